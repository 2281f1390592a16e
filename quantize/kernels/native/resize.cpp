// Resize: an image of another size, whose values are those of the nearest pixels, or between those of up to four; uint8 NHWC.
//
// Inputs: x, x_scale, x_zero_point, y_scale, y_zero_point; all but x are constants with one value. The size is `rows` and
// `columns`; where they are 0 it is that of x times scale_down and scale_across. The attribute `positions` is where pixel i of
// the result lies among those of x, as ONNX defines it: 0 half_pixel, 1 asymmetric, 2 align_corners, 3 pytorch_half_pixel. A
// position outside of x is that of the pixel at the border. The attribute `nearest` is 0 for values between pixels:
//
//   y = clip(rint(x_scale / y_scale * (value - x_zero_point)) + y_zero_point), the value in float
//
// Else it is how a position becomes that of a pixel, as ONNX defines it: 1 round_prefer_floor, 2 round_prefer_ceil, 3 floor,
// 4 ceil. The scale and zero point of y are those of x then.
#include <algorithm>
#include <cmath>

#include "operators.h"
#include "short_copies.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.Resize"};

constexpr int64_t kMostPixels = 1 << 24;  // of an axis: float holds their positions
constexpr float kTie = 1e-6f;  // so near the middle of two pixels, a position is there, as in ONNX Runtime 1.32; not in 1.23

enum Nearest : int64_t { kBetween, kPreferFloor, kPreferCeil, kFloor, kCeil };

enum Positions : int64_t { kHalfPixel, kAsymmetric, kAlignCorners, kTorchHalfPixel };

// An axis of the image: the length of the result, or 0, and the ratio of both lengths.
struct Axis {
  int64_t length;
  float scale;

  int64_t length_of(int64_t input) const { return length > 0 ? length : static_cast<int64_t>(scale * static_cast<float>(input)); }
};

class ResizeKernel {
 public:
  explicit ResizeKernel(const ort::Node& node)
      : target_(chosen()),
        ratio_(positive(positive(one<float>(require, node, 1)) / positive(one<float>(require, node, 3)))),
        zero_(one<uint8_t>(require, node, 2)),
        y_zero_(one<uint8_t>(require, node, 4)),
        axes_{axis(node, "rows", "scale_down"), axis(node, "columns", "scale_across")},
        positions_(node.attribute("positions", kHalfPixel)),
        nearest_(node.attribute("nearest", kBetween)) {
    require(positions_ >= kHalfPixel && positions_ <= kTorchHalfPixel, "positions must be 0 to 3");
    require(nearest_ >= kBetween && nearest_ <= kCeil, "nearest must be 0 to 4");
    require(nearest_ == kBetween || (ratio_ == 1 && zero_ == y_zero_), "the nearest pixels keep their scale and zero point");
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    require(x.shape.size() == 4, "x must be (batch, height, width, channels)");
    const int64_t batch = x.shape[0], height = x.shape[1], width = x.shape[2], channels = x.shape[3];
    require(std::min(height, width) > 0 && std::max(height, width) <= kMostPixels, "x has no pixels, or too many");
    const int64_t rows = axes_[0].length_of(height), columns = axes_[1].length_of(width);
    require(std::min(rows, columns) > 0 && std::max(rows, columns) <= kMostPixels, "the result has no pixels, or too many");
    uint8_t* const y = run.output({batch, rows, columns, channels});
    if (batch == 0 || channels == 0) return;
    thread_local std::vector<Between> found;  // grows to the longest row
    found.resize(columns);
    for (int64_t i = 0; i < columns; ++i) found[i] = between(axes_[1], i, width, columns);
    const Between* const across = found.data();  // those of this thread, also in others
    run.parallel(static_cast<size_t>(batch * rows), [&](size_t index) {
      const int64_t image = static_cast<int64_t>(index) / rows, row = static_cast<int64_t>(index) % rows;
      const Between down = between(axes_[0], row, height, rows);
      const uint8_t* const from = x.as<uint8_t>() + image * height * width * channels;
      const uint8_t* const first = from + down.first * width * channels;
      uint8_t* const to = y + static_cast<int64_t>(index) * columns * channels;
      if (nearest_ != kBetween) return copy_pixels(first, across, columns, channels, to);
      const RowPair pair{first, from + down.second * width * channels, down.share, width, channels, ratio_, zero_, y_zero_};
      target_.vectors.interpolate(pair, across, columns, to);
    });
  }

 private:
  static Axis axis(const ort::Node& node, const char* length, const char* scale) {
    const Axis made{node.attribute(length, 0), node.real_attribute(scale, 0)};
    require(made.length >= 0 && made.length <= kMostPixels, "a length must not be negative, nor too large");
    require(made.length > 0 || (made.scale > 0 && made.scale <= static_cast<float>(kMostPixels)), "a scale must be positive");
    return made;
  }

  // Copies the pixels of a row.
  static void copy_pixels(const uint8_t* from, const Between* columns, int64_t count, int64_t channels, uint8_t* to) {
    with_copy(static_cast<size_t>(channels), [&](const auto& copy) {
      for (int64_t i = 0; i < count; ++i) copy(to + i * channels, from + columns[i].first * channels);
    });
  }

  // Returns where a pixel of the result lies among those of x, along an axis; the first of both pixels if it is the nearest one.
  Between between(const Axis& axis, int64_t index, int64_t input, int64_t output) const {
    const float scale = axis.length > 0 ? static_cast<float>(output) / static_cast<float>(input) : axis.scale;
    const float most = static_cast<float>(input - 1);
    const float at = std::clamp(pixel(position(static_cast<float>(index), scale, input, output)), 0.0f, most);
    const int64_t first = static_cast<int64_t>(at);
    return {first, std::min(first + 1, input - 1), at - static_cast<float>(first)};
  }

  // Returns the nearest pixel of a position, or the position itself.
  float pixel(float at) const {
    const float below = std::floor(at), share = at - below;
    const bool tie = std::abs(share - 0.5f) <= kTie;
    switch (nearest_) {
      case kPreferFloor: return share > 0.5f && !tie ? below + 1 : below;
      case kPreferCeil: return share > 0.5f || tie ? below + 1 : below;
      case kFloor: return below;
      case kCeil: return std::ceil(at);
      default: return at;
    }
  }

  float position(float index, float scale, int64_t input, int64_t output) const {
    switch (positions_) {
      case kAsymmetric: return index / scale;
      case kAlignCorners:
        return output == 1 ? 0.0f : index * static_cast<float>(input - 1) / static_cast<float>(output - 1);
      case kTorchHalfPixel: return output == 1 ? 0.0f : (index + 0.5f) / scale - 0.5f;
      default: return (index + 0.5f) / scale - 0.5f;
    }
  }

  const Target& target_;
  float ratio_;
  int zero_, y_zero_;
  Axis axes_[2];  // down and across
  int64_t positions_, nearest_;
};

}  // namespace

std::vector<ort::CustomOp*> resize_operators() {
  using enum ort::ElementType;
  return named<ResizeKernel>("Resize", {kUint8, kFloat, kUint8, kFloat, kUint8}, 5);
}

}  // namespace requant
