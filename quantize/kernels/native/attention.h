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
  void run(const VectorKernels& vectors, const AttentionSize& size, const Head& head) {
    vectors_ = &vectors;
    keys_.take_rows({head.k, head.k_step}, size.keys, size.depth, size.scale);
    values_.take_columns({head.v, head.v_step}, size.keys, size.width);
    const int64_t pitch = divided(size.keys, kKeys) * kKeys;
    const int64_t most = std::clamp<int64_t>(kHeld / pitch / kAtLeast, 1, size.queries / kAtLeast + 1) * kAtLeast;
    const int64_t rows = divided(size.queries, divided(size.queries, most));
    for (int64_t first = 0; first < size.queries; first += rows)
      attend(size, head, {first, std::min(rows, size.queries - first), pitch, head.sink});
  }

 private:
  static constexpr int64_t kHeld = 1 << 14;     // scores that are computed at once, about: they stay in the second cache
  static constexpr int64_t kAtLeast = 32;       // queries
  static constexpr int64_t kKeys = 4 * kLanes;  // shares become bytes in such steps

  // Some queries, the floats from the scores of one to those of the next, and the sink of the head.
  struct Part {
    int64_t first, rows, pitch;
    float sink;
  };

  void attend(const AttentionSize& size, const Head& head, const Part& part) {
    const int64_t rows = part.rows;
    Rounding* const how = roundings_.values<Rounding>(rows);
    const RoundedRows queries = rounded_queries(size, head, part, how);
    float* const scores = scores_.floats(rows * part.pitch);
    const int64_t keys = seen_keys(size, head, part, how);
    multiply(queries, keys_, panels_until(keys), keys_.quads(), how, {scores, part.pitch});
    find_greatest(size, head, part, keys, scores);
    const RoundedRows shares = rounded_shares(part, keys, scores, how);
    float* const y = head.y + part.first * head.y_step;
    const bool whole = keys == size.keys || kOffset != 0;  // sums begin with what all keys need
    const int64_t quads = whole ? values_.quads() : keys / 4;
    multiply(shares, values_, std::ssize(values_.panels()), quads, how, {y, head.y_step});
    refine(part, scores, size.width, {keys, quads}, {y, head.y_step});
  }

  RoundedRows rounded_queries(const AttentionSize& size, const Head& head, const Part& part, Rounding* how) {
    const int64_t bytes = 4 * keys_.quads();
    uint8_t* const queries = queries_.bytes(part.rows * bytes);
    for (int64_t row = 0; row < part.rows; ++row) {
      how[row] = round_row(head.q + (part.first + row) * head.q_step, size.depth, queries + row * bytes);
      std::memset(queries + row * bytes + size.depth, 0, bytes - size.depth);  // its weights are 0
    }
    return {queries, bytes, part.rows};
  }

  // Returns how many keys some queries see, at most: their order hides the keys behind them, or the mask makes the shares of all
  // these less than 2^-30 of that of the first key, which all see without a window. A score is at most the depth times the
  // greatest values of its factors. If these are not all keys, it is a multiple of kKeys.
  int64_t seen_keys(const AttentionSize& size, const Head& head, const Part& part, const Rounding* how) const {
    const int64_t last = part.first + part.rows - 1, most = std::min(size.keys, divided(size.seen_by(last), kKeys) * kKeys);
    if (head.mask == nullptr || head.mask_repeats || head.window != nullptr || size.hidden_before(last) > 0) return most;
    const float key = keys_.widest() * 127 * static_cast<float>(size.depth);
    int64_t seen = kKeys;
    for (int64_t row = 0; row < part.rows; ++row) {
      const float* const mask = head.mask + (part.first + row) * head.mask_step;
      const float hidden = mask[0] - 2 * key * 255 * how[row].step - 21;  // exp(-21) is less than 2^-30
      while (seen < size.keys && !all_below(mask + seen, size.keys - seen, hidden)) seen += kKeys;
    }
    return std::min(seen, most);
  }

  // Whether all values are below a bound; a value or bound that is NaN counts as above. Equal ones are not below: where all masks
  // of a query are -1e30, so is the bound, and the query sees all keys alike.
  static bool all_below(const float* values, int64_t count, float bound) {
    bool below = true;
    for (int64_t i = 0; i < count; ++i) below &= values[i] < bound;
    return below;
  }

  // Returns the number of panels that have the first keys.
  int64_t panels_until(int64_t keys) const {
    const auto& panels = keys_.panels();
    return std::count_if(panels.begin(), panels.end(), [&](const Panel& panel) { return panel.channel < keys; });
  }

  // Finds the greatest score of each row. What follows is apart from it: it would wait for each of them.
  void find_greatest(const AttentionSize& size, const Head& head, const Part& part, int64_t keys, float* scores) {
    most_.resize(part.rows);
    for (int64_t row = 0; row < part.rows; ++row)
      most_[row] = vectors_->greatest_seen(size, head, part.first + row, keys, scores + row * part.pitch);
  }

  RoundedRows rounded_shares(const Part& part, int64_t keys, const float* scores, Rounding* how) {
    const int64_t whole = divided(keys, kKeys) * kKeys, wide = pitch_of_shares(part);
    uint8_t* const shares = shares_.bytes(part.rows * wide);
    rough_.clear();
    for (int64_t row = 0; row < part.rows; ++row) {
      const Shares found = round_softmax(scores + row * part.pitch, keys, most_[row], part.sink, shares + row * wide);
      how[row] = {found.step, 0};
      if (found.rough) rough_.push_back(row);
      std::memset(shares + row * wide + whole, 0, wide - whole);
    }
    return {shares, wide, part.rows};
  }

  int64_t pitch_of_shares(const Part& part) const { return std::max(part.pitch, 4 * values_.quads()); }

  // Keys that are seen, and the quads of their shares that are multiplied.
  struct Seen {
    int64_t keys, quads;
  };

  // Floats by row, `step` apart.
  struct Written {
    float* first;
    int64_t step;
  };

  // Computes rough rows again, with shares of 16 bits: the high bytes are rows of a product, and the low bytes rows behind them.
  void refine(const Part& part, const float* scores, int64_t width, const Seen& seen, const Written& y) {
    const int64_t count = std::ssize(rough_), wide = pitch_of_shares(part);
    if (count == 0) return;
    uint8_t* const bytes = shares_.bytes(2 * count * wide);
    std::memset(bytes, 0, 2 * count * wide);
    Rounding* const how = roundings_.values<Rounding>(2 * count);
    for (int64_t i = 0; i < count; ++i) {
      const float step = round_finely(scores + rough_[i] * part.pitch, seen.keys, most_[rough_[i]], part.sink, bytes + i * wide,
                                      bytes + (count + i) * wide);
      how[i] = {256 * step, 0};
      how[count + i] = {step, 0};
    }
    float* const parts = parts_.floats(2 * count * width);
    multiply({bytes, wide, 2 * count}, values_, std::ssize(values_.panels()), seen.quads, how, {parts, width});
    for (int64_t i = 0; i < count; ++i)
      for (int64_t column = 0; column < width; ++column)
        y.first[rough_[i] * y.step + column] = parts[i * width + column] + parts[(count + i) * width + column];
  }

  // Writes the product of some rows, so many quads of each, and the first panels of an operand.
  __attribute__((noinline)) static void multiply(const RoundedRows& rows, const Operand<Way>& operand, int64_t panels,
                                                 int64_t quads, const Rounding* how, const Written& to) {
    const Results results{reinterpret_cast<uint8_t*>(to.first), to.step * static_cast<int64_t>(sizeof(float)), nullptr, false};
    const FloatFinish finish(operand.channels(), Function::kNone, how, results);
    multiply_rows<Way>(rows, {operand.panels().data(), panels, quads, false}, finish);
  }

  const VectorKernels* vectors_ = nullptr;
  Operand<Way> keys_, values_;
  Scratch queries_, roundings_, scores_, shares_, parts_;
  std::vector<float> most_;     // the greatest score of each row
  std::vector<int64_t> rough_;  // rows with many small shares, which 8 bits would lose
};

template <class Way>
void attend(const VectorKernels& vectors, const AttentionSize& size, const Head& head) {
  thread_local Attention<Way> attention;  // its memory grows to the largest head
  attention.run(vectors, size, head);
}

}  // namespace requant::REQUANT_TARGET
