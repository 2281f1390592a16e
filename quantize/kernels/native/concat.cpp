// Concat: two to four uint8 tensors, one behind the other along the last axis.
//
// Inputs: a, a_table, b, b_table, c, c_table, d, d_table. The tensors c and d, or d alone, may be missing, and any table; a
// table is a constant of shape (256,), and brings the values of a tensor to the scale of the result.
#include <algorithm>

#include "operators.h"
#include "short_copies.h"
#include "target.h"

namespace requant {
namespace {

constexpr size_t kMost = 4;         // tensors
constexpr size_t kChunk = 1 << 14;  // bytes of one task, about

constexpr Requirement require{"ai.requant.Concat"};

class ConcatKernel {
 public:
  explicit ConcatKernel(const ort::Node& node) : target_(chosen()), count_(node.count()) {
    for (size_t i = 0; i < kMost; ++i) {
      const ort::Tensor table = node.constant(2 * i + 1);
      require(!table || table.shape == std::vector<int64_t>{256}, "a table must be (256,)");
      if (table) tables_[i].assign(table.as<uint8_t>(), table.as<uint8_t>() + 256);
    }
  }

  void run(const ort::Run& run) const {
    std::vector<ort::Tensor> parts;
    for (size_t i = 0; i < kMost && 2 * i < count_; ++i) {
      ort::Tensor part = run.input(2 * i);
      if (!part) break;
      parts.push_back(std::move(part));
    }
    std::vector<int64_t> shape = parts[0].shape;
    require(!shape.empty(), "the tensors need an axis");
    for (size_t i = 1; i < parts.size(); ++i) {
      const std::vector<int64_t>& other = parts[i].shape;
      require(other.size() == shape.size() && std::equal(other.begin(), other.end() - 1, shape.begin()),
              "the tensors may differ in their last axis alone");
      shape.back() += other.back();
    }
    uint8_t* y = run.output(shape);
    const size_t width = static_cast<size_t>(shape.back());
    int64_t rows = 1;
    for (size_t axis = 0; axis + 1 < shape.size(); ++axis) rows *= shape[axis];
    if (rows == 0 || width == 0) return;
    const size_t unit = std::max<size_t>(1, kChunk / width), all = static_cast<size_t>(rows);
    run.parallel((all + unit - 1) / unit, [&](size_t index) {
      const size_t first = index * unit;
      join(parts, first, std::min(unit, all - first), y + first * width, width);
    });
  }

 private:
  // Writes some rows of the result, which have `width` values, from the first one on.
  void join(const std::vector<ort::Tensor>& parts, size_t first, size_t rows, uint8_t* to, size_t width) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      const size_t size = static_cast<size_t>(parts[i].shape.back());
      if (size == 0) continue;  // its data may be null
      const uint8_t* const from = parts[i].as<uint8_t>() + first * size;
      const uint8_t* const values = tables_[i].empty() ? from : looked_up(from, rows * size, tables_[i]);
      with_copy(size, [&](const auto& copy) {
        for (size_t row = 0; row < rows; ++row) copy(to + row * width, values + row * size);
      });
      to += size;
    }
  }

  // Returns what the table makes of some values, in memory of this thread.
  const uint8_t* looked_up(const uint8_t* from, size_t count, const std::vector<uint8_t>& table) const {
    thread_local std::vector<uint8_t> made;  // grows to the longest rows
    made.resize(std::max(made.size(), count));
    target_.vectors.lookup(from, made.data(), count, table.data());
    return made.data();
  }

  const Target& target_;
  size_t count_;  // of the node's inputs
  std::vector<uint8_t> tables_[kMost];
};

}  // namespace

std::vector<ort::CustomOp*> concat_operators() {
  using enum ort::ElementType;
  return named<ConcatKernel>("Concat", {kUint8, kUint8, kUint8, kUint8, kUint8, kUint8, kUint8, kUint8}, 1);
}

}  // namespace requant
