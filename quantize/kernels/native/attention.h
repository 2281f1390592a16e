// Attention of one head: keys and values become weights, and the softmax of a row becomes the patch of the second product.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "float_finish.h"
#include "operand.h"
#include "rounded_rows.h"
#include "row_product.h"
#include "softmax.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

template <class Way>
class Attention {
 public:
  void run(const AttentionSize& size, const Head& head) {
    keys_.take_rows({head.k, head.k_step}, size.keys, size.depth, size.scale);
    values_.take_columns({head.v, head.v_step}, size.keys, size.width);
    const int64_t pitch = divided(size.keys, 4 * kLanes) * 4 * kLanes;  // floats of a row of scores
    const int64_t most = std::clamp<int64_t>(kHeld / pitch / kAtLeast, 1, size.queries / kAtLeast + 1) * kAtLeast;
    const int64_t rows = divided(size.queries, divided(size.queries, most));
    for (int64_t first = 0; first < size.queries; first += rows)
      attend(size, head, first, std::min(rows, size.queries - first), pitch);
  }

 private:
  static constexpr int64_t kHeld = 1 << 14;  // scores that are computed at once, about: they stay in the second cache
  static constexpr int64_t kAtLeast = 32;    // queries

  void attend(const AttentionSize& size, const Head& head, int64_t first, int64_t rows, int64_t pitch) {
    const int64_t bytes = 4 * keys_.quads(), wide = std::max(pitch, 4 * values_.quads());
    uint8_t* const queries = queries_.bytes(rows * bytes);
    Rounding* const how = reinterpret_cast<Rounding*>(roundings_.bytes(rows * static_cast<int64_t>(sizeof(Rounding))));
    for (int64_t row = 0; row < rows; ++row) {
      how[row] = round_row(head.q + (first + row) * head.q_step, size.depth, queries + row * bytes);
      std::memset(queries + row * bytes + size.depth, 0, bytes - size.depth);  // its weights are 0
    }
    float* const scores = reinterpret_cast<float*>(scores_.bytes(rows * pitch * static_cast<int64_t>(sizeof(float))));
    multiply(keys_, {queries, bytes, rows}, how, scores, pitch);
    uint8_t* const shares = shares_.bytes(rows * wide);
    rough_.assign(rows, false);
    most_.resize(rows);
    for (int64_t row = 0; row < rows; ++row) {  // apart from what follows, which would wait for each greatest score
      float* const of_row = scores + row * pitch;
      if (head.mask != nullptr) add_mask(of_row, head.mask + (first + row) * head.mask_step, size.keys, head.mask_repeats);
      std::fill(of_row + size.keys, of_row + pitch, -INFINITY);
      most_[row] = greatest(of_row, pitch);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const Shares found = round_softmax(scores + row * pitch, size.keys, most_[row], shares + row * wide);
      how[row] = {found.step, 0};
      rough_[row] = found.rough;
      std::memset(shares + row * wide + pitch, 0, wide - pitch);
    }
    float* const y = head.y + first * head.y_step;
    multiply(values_, {shares, wide, rows}, how, y, head.y_step);
    for (int64_t row = 0; row < rows; ++row)
      if (rough_[row])
        weigh_row(scores + row * pitch, size.keys, most_[row], {head.v, head.v_step}, size.width, y + row * head.y_step);
  }

  // Writes the product of some rows and an operand, `step` floats from row to row.
  static void multiply(const Operand<Way>& operand, const RoundedRows& rows, const Rounding* how, float* y, int64_t step) {
    const Results results{reinterpret_cast<uint8_t*>(y), step * static_cast<int64_t>(sizeof(float)), nullptr};
    const Panels panels{operand.panels().data(), static_cast<int64_t>(operand.panels().size()), operand.quads()};
    multiply_rows<Way>(rows, panels, FloatFinish(operand.channels(), Function::kNone, how, results));
  }

  Operand<Way> keys_, values_;
  Scratch queries_, roundings_, scores_, shares_;
  std::vector<float> most_;  // the greatest score of each row
  std::vector<bool> rough_;  // rows that are computed in float: integers lose too many small shares
};

template <class Way>
void attend(const AttentionSize& size, const Head& head) {
  thread_local Attention<Way> attention;  // its memory grows to the largest head
  attention.run(size, head);
}

}  // namespace requant::REQUANT_TARGET
