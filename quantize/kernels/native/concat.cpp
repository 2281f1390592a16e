// Concat: two to four uint8 tensors, one behind the other along the last axis.
//
// Inputs: a, a_table, b, b_table, c, c_table, d, d_table. The tensors c and d, or d alone, may be missing, and any table; a
// table is a constant of shape (256,), and brings the values of a tensor to the scale of the result.
#include <algorithm>
#include <cstring>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr size_t kMost = 4;         // tensors
constexpr size_t kChunk = 1 << 14;  // bytes of one task, about

constexpr Requirement require{"ai.requant.Concat"};

class ConcatKernel {
 public:
  explicit ConcatKernel(const ort::Node& node) : target_(chosen()) {
    for (size_t i = 0; i < kMost; ++i) {
      const ort::Tensor table = node.constant(2 * i + 1);
      require(!table || table.shape == std::vector<int64_t>{256}, "a table must be (256,)");
      if (table) tables_[i].assign(table.as<uint8_t>(), table.as<uint8_t>() + 256);
    }
  }

  void run(const ort::Run& run) const {
    std::vector<ort::Tensor> parts;
    for (size_t i = 0; i < kMost; ++i) {
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
      for (size_t row = index * unit; row < std::min(all, (index + 1) * unit); ++row) join(parts, row, y + row * width);
    });
  }

 private:
  void join(const std::vector<ort::Tensor>& parts, size_t row, uint8_t* to) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      const size_t count = static_cast<size_t>(parts[i].shape.back());
      if (count == 0) continue;  // its data may be null
      const uint8_t* from = parts[i].as<uint8_t>() + row * count;
      if (tables_[i].empty())
        std::memcpy(to, from, count);
      else
        target_.lookup(from, to, count, tables_[i].data());
      to += count;
    }
  }

  const Target& target_;
  std::vector<uint8_t> tables_[kMost];
};

}  // namespace

std::vector<ort::CustomOp*> concat_operators() {
  using enum ort::ElementType;
  return named<ConcatKernel>("Concat", {kUint8, kUint8, kUint8, kUint8, kUint8, kUint8, kUint8, kUint8}, 1);
}

}  // namespace requant
