// Table: y[i] = table[x[i]] for uint8 tensors of any shape.
//
// Any chain of elementwise functions between two scales is a table of 256 entries. A table of shape (C, 256) has one row
// for each index of the last axis.
#include <algorithm>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.Table"};
constexpr size_t kChunk = 1 << 14;  // bytes of one task

class TableKernel {
 public:
  explicit TableKernel(const ort::Node& node) : target_(chosen()) {
    const ort::Tensor table = node.constant(1);
    require(bool{table}, "the table must be a constant");
    require(!table.shape.empty() && table.shape.back() == 256 && table.shape.size() <= 2 && table.size() > 0,
            "the shape of the table must be (256,) or (C, 256)");
    table_.assign(table.as<uint8_t>(), table.as<uint8_t>() + table.size());
    channels_ = table.shape.size() == 2 ? table.shape[0] : 0;
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    require(channels_ == 0 || (!x.shape.empty() && x.shape.back() == channels_),
            "the table needs one row for each index of the last axis");
    uint8_t* y = run.output(x.shape);
    const size_t size = static_cast<size_t>(x.size());
    if (size == 0) return;
    const size_t unit = channels_ ? std::max<size_t>(1, kChunk / channels_) * channels_ : kChunk;
    run.parallel((size + unit - 1) / unit, [&](size_t index) {
      const size_t first = index * unit, count = std::min(unit, size - first);
      channels_ ? by_channel(x.as<uint8_t>() + first, y + first, count)
                : target_.vectors.lookup(x.as<uint8_t>() + first, y + first, count, table_.data());
    });
  }

 private:
  void by_channel(const uint8_t* from, uint8_t* to, size_t count) const {
    for (size_t start = 0; start < count; start += channels_)
      for (size_t c = 0; c < static_cast<size_t>(channels_); ++c) to[start + c] = table_[256 * c + from[start + c]];
  }

  const Target& target_;
  std::vector<uint8_t> table_;
  int64_t channels_ = 0;
};

}  // namespace

std::vector<ort::CustomOp*> table_operators() {
  return named<TableKernel>("Table", {ort::kUint8, ort::kUint8}, 2);
}

}  // namespace requant
