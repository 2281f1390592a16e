// DepthToSpace: the channels of each pixel become a block of pixels; uint8 NHWC.
//
// Input: x (batch, height, width, block * block * channels). With the attribute `depth_first` 1 the channels of a pixel are those
// of each pixel of the block, one after the other (DCR in ONNX); else each channel has the values of all pixels of it (CRD).
#include <algorithm>
#include <cstring>

#include "operators.h"
#include "short_copies.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.DepthToSpace"};

constexpr size_t kTable = 256;      // values that are put in order at once
constexpr int64_t kLargest = 1024;  // block

// The sizes of a run: pixels of a row of x, bytes of a row of y, channels and rows of a block.
struct Sizes {
  size_t width, line, channels, block;
  size_t pixels() const { return block * block; }
  size_t depth() const { return channels * pixels(); }
};

// Returns some values, from which a table may be read that is larger: those at the end of x are copied.
const uint8_t* as_table(const uint8_t* from, size_t count, const uint8_t* end, uint8_t (&copy)[kTable]) {
  if (end - from >= static_cast<ptrdiff_t>(kTable)) return from;
  std::memcpy(copy, from, count);
  return copy;
}

class DepthToSpaceKernel {
 public:
  explicit DepthToSpaceKernel(const ort::Node& node)
      : target_(chosen()), block_(node.attribute("blocksize", 1)), depth_first_(node.attribute("depth_first", 1) != 0) {
    require(block_ >= 1 && block_ <= kLargest, "blocksize must be 1 to 1024");
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(0);
    require(x.shape.size() == 4 && x.shape[3] % (block_ * block_) == 0,
            "x must be (batch, height, width, channels of all pixels of a block)");
    const int64_t height = x.shape[1], width = x.shape[2], channels = x.shape[3] / (block_ * block_);
    uint8_t* const y = run.output({x.shape[0], height * block_, width * block_, channels});
    if (x.size() == 0) return;
    const Sizes sizes{static_cast<size_t>(width), static_cast<size_t>(width * block_ * channels), static_cast<size_t>(channels),
                      static_cast<size_t>(block_)};
    const uint8_t* const end = x.as<uint8_t>() + x.size();
    run.parallel(static_cast<size_t>(x.shape[0] * height), [&](size_t row) {
      const size_t at = row * sizes.line * sizes.block;
      if (sizes.depth() <= kTable) return order_pixels(x.as<uint8_t>() + at, end, y + at, sizes);
      if (depth_first_) return copy_rows(x.as<uint8_t>() + at, y + at, sizes);
      sizes.pixels() <= kTable ? order_channels(x.as<uint8_t>() + at, end, y + at, sizes)
                               : order_values(x.as<uint8_t>() + at, y + at, sizes);
    });
  }

 private:
  // Each of these writes the rows of y that a row of pixels becomes.

  // Some pixels are a table, which is read in another order: that of the rows of their blocks.
  void order_pixels(const uint8_t* from, const uint8_t* end, uint8_t* to, const Sizes& sizes) const {
    const auto [width, line, channels, block] = sizes;
    const size_t some = kTable / sizes.depth(), part = block * channels;  // pixels, bytes of a row of a block
    uint8_t order[kTable] = {}, made[kTable], copy[kTable] = {};
    size_t at = 0;
    for (size_t row = 0; row < block; ++row)
      for (size_t pixel = 0; pixel < some; ++pixel)
        for (size_t i = 0; i < part; ++i, ++at) {
          const size_t place = row * block + i / channels, channel = i % channels;
          const size_t inside = depth_first_ ? place * channels + channel : channel * sizes.pixels() + place;
          order[at] = static_cast<uint8_t>(pixel * sizes.depth() + inside);
        }
    for (size_t first = 0; first < width; first += some) {
      const size_t count = std::min(some, width - first);
      target_.vectors.lookup(order, made, at, as_table(from, count * sizes.depth(), end, copy));
      for (size_t row = 0; row < block; ++row)
        std::memcpy(to + row * line + first * part, made + row * some * part, count * part);
      from += count * sizes.depth();
    }
  }

  // The rows of a block follow each other in a pixel.
  void copy_rows(const uint8_t* from, uint8_t* to, const Sizes& sizes) const {
    const size_t part = sizes.block * sizes.channels;
    with_copy(part, [&](const auto& copy) {
      for (size_t at = 0; at < sizes.line; at += part)
        for (size_t row = 0; row < sizes.block; ++row, from += part) copy(to + row * sizes.line + at, from);
    });
  }

  // Some channels of a pixel are a table, which is read in another order: that of the pixels of its block.
  void order_channels(const uint8_t* from, const uint8_t* end, uint8_t* to, const Sizes& sizes) const {
    const auto [width, line, channels, block] = sizes;
    const size_t pixels = sizes.pixels(), some = kTable / pixels;  // channels
    uint8_t order[kTable] = {}, made[kTable], copy[kTable] = {};
    for (size_t i = 0; i < pixels * some; ++i) order[i] = static_cast<uint8_t>(i % some * pixels + i / some);
    for (size_t at = 0; at < line; at += block * channels)
      for (size_t first = 0; first < channels; first += some) {
        const size_t count = std::min(some, channels - first);
        target_.vectors.lookup(order, made, pixels * some, as_table(from, count * pixels, end, copy));
        for (size_t pixel = 0; pixel < pixels; ++pixel)
          std::memcpy(to + pixel / block * line + at + pixel % block * channels + first, made + pixel * some, count);
        from += count * pixels;
      }
  }

  // A block has more pixels than a table has values.
  void order_values(const uint8_t* from, uint8_t* to, const Sizes& sizes) const {
    const auto [width, line, channels, block] = sizes;
    for (size_t at = 0; at < line; at += block * channels)
      for (size_t channel = 0; channel < channels; ++channel)
        for (size_t pixel = 0; pixel < sizes.pixels(); ++pixel)
          to[pixel / block * line + at + pixel % block * channels + channel] = *from++;
  }

  const Target& target_;
  int64_t block_;
  bool depth_first_;
};

}  // namespace

std::vector<ort::CustomOp*> depth_to_space_operators() { return named<DepthToSpaceKernel>("DepthToSpace", {ort::kUint8}, 1); }

}  // namespace requant
