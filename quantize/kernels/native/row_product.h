// The product of rows that are rounded to 8 bits and panels of weights, with results in float.
#pragma once

#include "block.h"
#include "finish.h"
#include "float_finish.h"
#include "panel.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// Rows of bytes, `pitch` bytes apart.
struct RoundedRows {
  const uint8_t* first;
  int64_t pitch, count;
};

// Neighbouring panels, the quads of a row that they have weights for, and whether these come from memory.
struct Panels {
  const Panel* first;
  int64_t count, quads;
  bool cold;
};

// Writes the products of rows and panels where `finish` says.
template <class Way>
void multiply_rows(const RoundedRows& rows, const Panels& panels, const FloatFinish& finish) {
  static const Convolution nothing;  // results in float need no convolution
  const Results& results = finish.results();
  const Block block{.rows = 1,
                    .columns = rows.count,
                    .patch = rows.first,
                    .patches = {rows.count * rows.pitch, rows.pitch},
                    .runs = {0, 0},
                    .count = {1, 1},
                    .quads = panels.quads,
                    .place = {results.first, nullptr},
                    .results = {rows.count * results.bytes, results.bytes},
                    .channel = sizeof(float),
                    .cold = panels.cold};
  const Finish whole(nothing, finish);
  typename Way::Product product(whole, block);
  product.multiply(panels.first, panels.count);
}

}  // namespace requant::REQUANT_TARGET
