// Lines: functions of uint8 tensors that are two lines for each index c of the last axis, and meet at one value:
//
//   y = clip(rint(lines[0][c] * min(x - bend, 0) + lines[1][c] * max(x - bend, 0) + lines[2][c]), least, most)
//
// Inputs: x and lines, a constant of shape (3, C). bend, least and most are attributes.
//
// With the attribute `sloped` there is a third input, and lines is (3, 1): slopes, a constant of the shape of an image of x
// without its first axis, are factors of lines[0], one for each element. With `planes` they are in CHW, and x is in HWC.
// Other nodes have constants of their bodies there.
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
    for (int64_t i = 0; i < lines.size(); ++i) require_flat(lines.as<float>()[i]);
    const int bend = byte_attribute(require, node, "bend", 0), least = byte_attribute(require, node, "least", 0),
              most = byte_attribute(require, node, "most", 0);
    require(least <= most, "least must not be above most");
    if (node.attribute("sloped", 0) != 0) {
      require(node.type(2) == ort::kFloat, "slopes must be float");
      spread(lines, node.constant(2), node.attribute("planes", 0) != 0);
    } else {
      image_ = {lines.shape[1]};
      repeat(lines.as<float>(), lines.shape[1]);
    }
    for (BentLines& part : parts_) {
      part.bend = bend;
      part.least = least;
      part.most = most;
    }
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    require(x.shape.size() >= image_.size() && std::equal(image_.rbegin(), image_.rend(), x.shape.rbegin()),
            "there must be lines for each index of the last axis, or slopes for each element");
    uint8_t* y = run.output(x.shape);
    const size_t size = static_cast<size_t>(x.size()), period = parts_[0].period, count = parts_.size();
    const size_t unit = count > 1 ? whole_ : std::max<size_t>(1, kChunk / period) * period;
    run.parallel((size + unit - 1) / unit * count, [&](size_t index) {
      const BentLines& part = parts_[index % count];
      const size_t inside = index % count * period, first = index / count * unit + inside;
      const size_t left = std::min(unit - inside, size - first);
      target_.vectors.bend_lines(part, x.as<uint8_t>() + first, y + first, count > 1 ? std::min(part.period, left) : left);
    });
  }

 private:
  static constexpr size_t kChunk = 1 << 14;     // elements of one task
  static constexpr float kMost = 1 << 22;       // so that int32 holds the results before they are clipped

  static void require_flat(float slope) { require(std::abs(slope) < kMost, "the lines are too steep"); }

  // Takes the parameters as often as whole vectors of bytes need them, if that is not too often.
  void repeat(const float* lines, int64_t channels) {
    BentLines& made = parts_.emplace_back();
    const int64_t all = filling(channels);
    for (std::vector<float>* each : {&made.below, &made.above, &made.level}) {
      for (int64_t i = 0; i < all; ++i) each->push_back(lines[i % channels]);
      each->resize(each->size() + BentLines::kBehind);
      lines += channels;
    }
    made.period = static_cast<size_t>(all);
  }

  // Takes the slopes of an image in the order of its elements, in parts as long as a task.
  void spread(const ort::Tensor& lines, const ort::Tensor& slopes, bool planes) {
    require(lines.shape[1] == 1 && bool(slopes) && slopes.size() > 0 && !slopes.shape.empty(),
            "slopes must be a constant beside lines of shape (3, 1)");
    image_ = slopes.shape;
    if (planes) std::rotate(image_.begin(), image_.begin() + 1, image_.end());
    whole_ = static_cast<size_t>(slopes.size());
    const size_t channels = planes ? static_cast<size_t>(slopes.shape[0]) : whole_, pixels = whole_ / channels;
    for (size_t i = 0; i < whole_; ++i) {
      if (i % kChunk == 0) {
        BentLines& made = parts_.emplace_back();
        made.period = std::min(kChunk, whole_ - i);
        made.kept = BentLines::kFlat;
        made.below.reserve(made.period + BentLines::kBehind);
        made.above.assign(2 * BentLines::kBehind, lines.as<float>()[1]);
        made.level.assign(2 * BentLines::kBehind, lines.as<float>()[2]);
      }
      const float slope = slopes.as<float>()[i % channels * pixels + i / channels] * lines.as<float>()[0];
      require_flat(slope);
      parts_.back().below.push_back(slope);
    }
    for (BentLines& part : parts_) part.below.resize(part.period + BentLines::kBehind);
  }

  const Target& target_;
  std::vector<BentLines> parts_;
  std::vector<int64_t> image_;  // the last axes of x
  size_t whole_ = 0;
};

}  // namespace

std::vector<ort::CustomOp*> lines_operators() { return named<LinesKernel>("Lines", {ort::kUint8, ort::kFloat}, 2); }

}  // namespace requant
