// Lines: functions of uint8 tensors that are two lines for each index c of the last axis, and meet at one value:
//
//   y = clip(rint(lines[0][c] * min(x - bend, 0) + lines[1][c] * max(x - bend, 0) + lines[2][c]), least, most)
//
// Inputs: x and lines, a constant of shape (3, C). bend, least and most are attributes.
#include <algorithm>
#include <cmath>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.Lines"};

class LinesKernel {
 public:
  explicit LinesKernel(const ort::Node& node) : target_(chosen()) {
    const ort::Tensor lines = node.constant(1);
    require(bool(lines) && lines.shape.size() == 2 && lines.shape[0] == 3 && lines.shape[1] > 0,
            "the lines must be a constant of shape (3, C)");
    for (int64_t i = 0; i < lines.size(); ++i) require(std::abs(lines.as<float>()[i]) < kMost, "the lines are too steep");
    channels_ = lines.shape[1];
    repeat(lines.as<float>());
    lines_.bend = byte_attribute(require, node, "bend", 0);
    lines_.least = byte_attribute(require, node, "least", 0);
    lines_.most = byte_attribute(require, node, "most", 0);
    require(lines_.least <= lines_.most, "least must not be above most");
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    require(!x.shape.empty() && x.shape.back() == channels_, "there must be lines for each index of the last axis");
    uint8_t* y = run.output(x.shape);
    const size_t size = static_cast<size_t>(x.size()), unit = std::max<size_t>(1, kChunk / lines_.period) * lines_.period;
    run.parallel((size + unit - 1) / unit, [&](size_t index) {
      const size_t first = index * unit;
      target_.vectors.bend_lines(lines_, x.as<uint8_t>() + first, y + first, std::min(unit, size - first));
    });
  }

 private:
  static constexpr size_t kChunk = 1 << 14;     // elements of one task
  static constexpr float kMost = 1 << 22;       // so that int32 holds the results before they are clipped

  // Takes the parameters as often as whole vectors of bytes need them, if that is not too often.
  void repeat(const float* lines) {
    const int64_t all = filling(channels_);
    for (std::vector<float>* each : {&lines_.below, &lines_.above, &lines_.level}) {
      for (int64_t i = 0; i < all; ++i) each->push_back(lines[i % channels_]);
      each->resize(each->size() + BentLines::kBehind);
      lines += channels_;
    }
    lines_.period = static_cast<size_t>(all);
  }

  const Target& target_;
  BentLines lines_;
  int64_t channels_ = 0;
};

}  // namespace

std::vector<ort::CustomOp*> lines_operators() { return named<LinesKernel>("Lines", {ort::kUint8, ort::kFloat}, 2); }

}  // namespace requant
