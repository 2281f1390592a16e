// GroupNormalization: each image and group of neighbouring channels is normalized by its own mean and variance; uint8 NHWC.
//
// Inputs: x, x_scale, x_zero_point, scale, B, y_scale, y_zero_point, curve, grid; all but x are constants. scale and B have a
// value for each channel, the scales and zero points have one. Attributes: `num_groups` and `epsilon`, `least` and `most`,
// which clip the result, and `curved`: whether there are a curve and a grid. Other nodes have constants of their bodies there.
//
//   y = clip(rint((x_scale * (x - mean) / sqrt(x_scale^2 * variance + epsilon) * scale + B) / y_scale) + y_zero_point,
//            least, most)
//
// The mean and the variance are those of the integers x of a group; their sums are exact. The curve and the grid are those of a
// Convolution: a function of the normalized value, in front of the rounding. Then least is 0 and most 255.
#include <algorithm>
#include <cmath>

#include "operators.h"
#include "rounded.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.GroupNormalization"};

class GroupNormalizationKernel {
 public:
  explicit GroupNormalizationKernel(const ort::Node& node)
      : target_(chosen()),
        x_scale_(positive(one<float>(require, node, 1))),
        rounded_(Rounded::of(require, node, 5, 7, node.attribute("curved", 0) != 0)),
        groups_(node.attribute("num_groups", 1)),
        epsilon_(node.real_attribute("epsilon", 1e-5f)),
        least_(byte_attribute(require, node, "least", 0)),
        most_(byte_attribute(require, node, "most", 255)),
        scale_(values(node, 3)),
        bias_(values(node, 4)) {
    require(!scale_.empty() && scale_.size() == bias_.size(), "scale and B must have a value for each channel");
    require(groups_ > 0 && channels() % groups_ == 0, "num_groups must divide the channels");
    require(epsilon_ > 0 && std::isfinite(epsilon_), "epsilon must be positive");
    require(least_ <= most_, "least must not be above most");
    if (rounded_.curve.empty()) {
      rounded_.offset = static_cast<float>(one<uint8_t>(require, node, 6));
    } else {
      require(least_ == 0 && most_ == 255, "a curve has no bounds");
      least_ = INT16_MIN;
      most_ = INT16_MAX;
    }
    together_ = filling(channels()) / channels();
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    require(x.shape.size() == 4 && x.shape[3] == channels(), "x must be (batch, height, width, channels)");
    uint8_t* const y = run.output(x.shape);
    const int64_t pixels = x.shape[1] * x.shape[2], size = pixels * channels();
    if (size == 0) return;
    for (int64_t image = 0; image < x.shape[0]; ++image)
      normalize(run, x.as<uint8_t>() + image * size, y + image * size, pixels);
  }

 private:
  static constexpr int64_t kPart = 1 << 16;        // values of one task, about
  static constexpr int64_t kMostPixels = 1 << 16;  // of one task: 32 bits hold the sums of their squares
  static constexpr float kMost = 0x1p60f;          // values of scale and B are below it
  static constexpr double kSteepest = 0x1p30;      // steps of the result: far more than it has

  // Normalizes an image.
  void normalize(const ort::Run& run, const uint8_t* x, uint8_t* y, int64_t pixels) const {
    const int64_t length = together_ * channels(), all = pixels * channels();
    const int64_t step = std::max<int64_t>(1, std::min(kPart, kMostPixels * channels()) / length) * length;
    const int64_t parts = divided(all, step);
    thread_local std::vector<uint32_t> moments;  // both grow to the largest image
    thread_local BentLines lines;
    moments.assign(static_cast<size_t>(parts * 2 * length), 0);
    uint32_t* const sums = moments.data();  // those of this thread, also in others
    run.parallel(static_cast<size_t>(parts), [&](size_t part) {
      const int64_t first = static_cast<int64_t>(part) * step;
      add_part(x + first, std::min(step, all - first), sums + static_cast<int64_t>(part) * 2 * length);
    });
    fill(sums, parts, static_cast<double>(pixels), lines);
    const BentLines* const made = &lines;
    run.parallel(static_cast<size_t>(parts), [&](size_t part) {
      const int64_t first = static_cast<int64_t>(part) * step;
      target_.vectors.bend_lines(*made, x + first, y + first, static_cast<size_t>(std::min(step, all - first)));
    });
  }

  static std::vector<float> values(const ort::Node& node, size_t index) {
    const ort::Tensor tensor = node.constant(index);
    std::vector<float> made(tensor.as<float>(), tensor.as<float>() + tensor.size());
    for (const float value : made) require(std::abs(value) < kMost, "scale and B must be finite");
    return made;
  }

  int64_t channels() const { return static_cast<int64_t>(scale_.size()); }

  // Adds the sums of `count` values, whole pixels, to those of a part.
  void add_part(const uint8_t* from, int64_t count, uint32_t* sums) const {
    const int64_t length = together_ * channels(), rows = count / length;
    target_.vectors.add_moments(from, static_cast<size_t>(rows), static_cast<size_t>(length), static_cast<size_t>(length), sums);
    target_.vectors.add_moments(from + rows * length, 1, static_cast<size_t>(count - rows * length),
                                static_cast<size_t>(length), sums);
  }

  // Writes what becomes of each value of an image, from the sums of its parts.
  void fill(const uint32_t* sums, int64_t parts, double pixels, BentLines& lines) const {
    const int64_t length = together_ * channels(), width = channels() / groups_;
    lines.period = static_cast<size_t>(length);
    lines.least = least_;
    lines.most = most_;
    lines.curve = rounded_.curve;
    for (std::vector<float>* each : {&lines.below, &lines.above, &lines.level}) each->resize(lines.period + BentLines::kBehind);
    for (int64_t first = 0; first < channels(); first += width) {
      const auto [mean, factor] = statistics(sums, parts, first, pixels * static_cast<double>(width));
      for (int64_t c = first; c < first + width; ++c) {
        const double slope = std::clamp(factor * scale_[static_cast<size_t>(c)], -kSteepest, kSteepest);
        const double level = bias_[static_cast<size_t>(c)] / rounded_.unit + rounded_.offset - slope * mean;
        for (size_t i = static_cast<size_t>(c); i < lines.period; i += scale_.size()) {
          lines.below[i] = lines.above[i] = static_cast<float>(slope);
          lines.level[i] = static_cast<float>(level);
        }
      }
    }
  }

  // The mean of a group, and how many steps of the result a step of x is, before `scale`; 0 if all x are equal.
  struct Statistics {
    double mean, factor;
  };

  // Returns the statistics of a group of `count` values, which begins with channel `first`.
  Statistics statistics(const uint32_t* sums, int64_t parts, int64_t first, double count) const {
    const int64_t length = together_ * channels(), width = channels() / groups_;
    uint64_t sum = 0, squares = 0;
    for (int64_t part = 0; part < parts; ++part, sums += 2 * length)
      for (int64_t pixel = 0; pixel < length; pixel += channels())
        for (int64_t c = pixel + first; c < pixel + first + width; ++c) {
          sum += sums[c];
          squares += sums[length + c];
        }
    const double mean = static_cast<double>(sum) / count, variance = static_cast<double>(squares) / count - mean * mean;
    if (variance <= 0) return {mean, 0};
    return {mean, x_scale_ / (std::sqrt(variance * x_scale_ * x_scale_ + epsilon_) * rounded_.unit)};
  }

  const Target& target_;
  float x_scale_;
  Rounded rounded_;
  int64_t groups_;
  float epsilon_;
  int least_, most_;
  std::vector<float> scale_, bias_;
  int64_t together_ = 1;  // pixels that are one row, which is as long as whole vectors
};

}  // namespace

std::vector<ort::CustomOp*> group_normalization_operators() {
  using enum ort::ElementType;
  return named<GroupNormalizationKernel>("GroupNormalization", {kUint8, kFloat, kUint8, kFloat, kFloat, kFloat, kUint8}, 7);
}

}  // namespace requant
