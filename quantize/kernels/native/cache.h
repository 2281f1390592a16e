// The keys or the values of earlier runs and of this run, for each item and head that q shares.
#pragma once

#include <algorithm>
#include <cstdint>

#include "aligned.h"
#include "target.h"

namespace requant {

// The floats of a tensor (batch, heads, rows, columns): the steps from one item, head and row to the next. A step of 0 repeats.
struct View {
  float* data = nullptr;
  int64_t item = 0, head = 0, row = 0;

  float* at(int64_t of_item, int64_t of_head) const { return data + of_item * item + of_head * head; }

  // Returns the view in which some neighbouring heads, of one row each, are the rows of one head.
  View grouped(int64_t heads) const { return {data, item, heads * head, head}; }
};

// A tensor with an axis for heads.
inline View with_heads(float* data, int64_t heads, int64_t rows, int64_t columns) {
  return {data, heads * rows * columns, rows * columns, columns};
}

// Heads side by side, from a column on, in a tensor (batch, rows, width).
inline View side_by_side(float* data, int64_t first, int64_t rows, int64_t width, int64_t columns) {
  return {data + first, rows * width, columns, width};
}

// What turns rows by their places.
struct Angles {
  const float *cos = nullptr, *sin = nullptr;
  int64_t count = 0;  // of each place
  bool interleaved = false;

  void turn(const float* from, int64_t place, int64_t columns, float* to) const {
    const float *c = cos + place * count, *s = sin + place * count;
    const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : count;
    for (int64_t i = 0; i < count; ++i, from += step, to += step) {
      const float one = from[0], other = from[apart];
      to[0] = one * c[i] - other * s[i];
      to[apart] = one * s[i] + other * c[i];
    }
    const int64_t behind = interleaved ? 0 : count;
    std::copy(from + behind, from + behind + columns - 2 * count, to + behind);
  }
};

// The new rows of a head, which stand behind `before` rows of earlier runs.
struct Fresh {
  int64_t item, head, before, rows;
  const View& values;
};

// Floats, or bytes with the step of each row: (batch, heads, rows, columns) and (batch, heads, rows, 1).
struct Cache {
  float* floats = nullptr;
  uint8_t* bytes = nullptr;
  float* steps = nullptr;
  int64_t heads = 0, rows = 0, columns = 0;

  int64_t row_of(int64_t item, int64_t head) const { return (item * heads + head) * rows; }

  const float* floats_of(int64_t item, int64_t head) const { return floats + row_of(item, head) * columns; }

  Cached cached(int64_t item, int64_t head) const {
    const int64_t row = row_of(item, head);
    return {bytes + row * columns, steps + row};
  }

  // Takes the rows of earlier runs, and behind them the new ones, turned. What is behind these becomes 0, except where the past
  // is this memory.
  void take(const Cache& past, const Fresh& fresh, const Angles& angles, const VectorKernels& vectors) const {
    const int64_t first = row_of(fresh.item, fresh.head) + fresh.before;
    const float* from = fresh.values.at(fresh.item, fresh.head);
    if (bytes == nullptr) {
      copy_around(past.floats, floats, columns, past, fresh, 0.0f);
    } else {
      copy_around(past.bytes, bytes, columns, past, fresh, uint8_t{kCacheZero});
      copy_around(past.steps, steps, 1, past, fresh, 0.0f);
    }
    thread_local Scratch scratch;
    for (int64_t i = 0; i < fresh.rows; ++i, from += fresh.values.row) {
      const int64_t row = first + i;
      float* const turned = bytes == nullptr ? floats + row * columns : scratch.floats(columns);
      angles.turn(from, fresh.before + i, columns, turned);
      if (bytes != nullptr) steps[row] = vectors.round_row(turned, columns, bytes + row * columns);
    }
  }

 private:
  // Copies what is before the new rows, and fills what is behind them; a row has `width` values.
  template <class Value>
  void copy_around(const Value* past, Value* all, int64_t width, const Cache& of_past, const Fresh& fresh, Value none) const {
    if (past == all) return;
    Value* const to = all + row_of(fresh.item, fresh.head) * width;
    if (past != nullptr) std::copy_n(past + of_past.row_of(fresh.item, fresh.head) * width, fresh.before * width, to);
    std::fill(to + (fresh.before + fresh.rows) * width, to + rows * width, none);
  }
};

}  // namespace requant
