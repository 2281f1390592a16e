// Convolution of each channel with a kernel of its own.
//
// A vector holds as many channels as it has bytes. Four taps at a time are transposed, so that the four bytes of a group
// belong to one channel, and multiplied by weights that were transposed in the same way when they were packed. The last
// vector of a pixel begins earlier and computes some channels again. A pixel with fewer channels than a vector has bytes
// is computed with bytes behind it, where there are any; their results are written again later.
#pragma once

#include <algorithm>
#include <cstring>

#include "curve.h"
#include "scaled.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

class Depthwise final : public ConvolutionKernel {
 public:
  explicit Depthwise(Convolution made)
      : conv_(std::move(made)), quads_((conv_.taps() + 3) / 4), blocks_((conv_.inputs + kBytes - 1) / kBytes) {
    for (int64_t block = 0; block < blocks_; ++block) pack(block);
    conv_.weights = {};
  }

  void run(const uint8_t* x, const uint8_t*, uint8_t* y, const Extent& extent, const Parallel& parallel) const override {
    parallel(static_cast<size_t>(extent.batch * extent.rows), [&](size_t index) {
      const int64_t image = static_cast<int64_t>(index) / extent.rows, row = static_cast<int64_t>(index) % extent.rows;
      const int64_t size = extent.height * extent.width * conv_.inputs;  // of an image
      const uint8_t *from = x + image * size, *end = x + extent.batch * size;
      compute_row(from, end, extent, row, y + static_cast<int64_t>(index) * extent.columns * conv_.inputs);
    });
  }

 private:
  // The first channel of a vector, and the number of its channels.
  int64_t first(int64_t block) const {
    return std::max<int64_t>(0, std::min(block * kBytes, conv_.inputs - kBytes));
  }
  int64_t channels() const { return std::min<int64_t>(kBytes, conv_.inputs); }

  void pack(int64_t block) {
    const int64_t count = channels(), taps = conv_.taps();
    bool narrow = true;
    uint8_t lane[4][kBytes] = {};
    for (int64_t quad = 0; quad < quads_; ++quad) {
      for (int64_t c = 0; c < count; ++c) {
        int8_t four[4] = {};
        for (int64_t i = 0; i < std::min<int64_t>(4, taps - 4 * quad); ++i)
          four[i] = conv_.weights[(first(block) + c) * taps + 4 * quad + i];
        narrow = narrow && fits_narrow(four);
        for (int i = 0; i < 4; ++i) lane[i][c] = static_cast<uint8_t>(four[i]);
      }
      append(lane, weights_);
    }
    narrow_.push_back(narrow);
    std::vector<uint8_t> order;  // the channel of each group of four
    for (int c = 0; c < kBytes; ++c)
      for (int i = 0; i < 4; ++i) lane[i][c] = static_cast<uint8_t>(c);
    append(lane, order);
    for (int group = 0; group < kBytes; ++group) {
      const int64_t c = order[4 * group], channel = first(block) + c;
      int32_t sum = 0;
      for (int64_t tap = 0; c < count && tap < taps; ++tap) sum += conv_.weights[channel * taps + tap];
      sums_.push_back(c < count ? conv_.bias[channel] - (conv_.x_zero - kOffset) * sum : 0);
      multiplier_.push_back(c < count ? conv_.multiplier[channel] : 0.0f);
    }
  }

  static void append(const uint8_t (&lane)[4][kBytes], std::vector<uint8_t>& to) {
    const Bytes in[4] = {load_bytes(lane[0]), load_bytes(lane[1]), load_bytes(lane[2]), load_bytes(lane[3])};
    Bytes out[4];
    transpose(in, out);
    to.resize(to.size() + 4 * kBytes);
    for (int i = 0; i < 4; ++i) store_bytes(to.data() + to.size() - (4 - i) * kBytes, out[i]);
  }

  // Computes a row of the result; `from` is the image, and `end` the end of all images.
  void compute_row(const uint8_t* from, const uint8_t* end, const Extent& extent, int64_t row, uint8_t* to) const {
    thread_local std::vector<const uint8_t*> taps;  // one pointer for each tap, padded to quads
    thread_local std::vector<uint8_t> outside;      // a row outside of the image
    const int64_t top = row * conv_.stride[0] - conv_.before[0], bottom = top + (conv_.kernel[0] - 1) * conv_.dilation[0];
    const bool cut = top < 0 || bottom >= extent.height;
    const uint8_t zero = static_cast<uint8_t>(conv_.x_zero);
    outside.assign((cut ? extent.width : 1) * conv_.inputs + kBytes, zero);
    taps.resize(4 * quads_);
    const int64_t reach = (conv_.kernel[1] - 1) * conv_.dilation[1];
    int64_t known = -1;  // the column of the pointers, if the kernel lies between the left and the right border there
    uint8_t *const start = to, *const stop = to + extent.columns * conv_.inputs;
    for (int64_t column = 0; column < extent.columns; ++column, to += conv_.inputs) {
      const int64_t left = column * conv_.stride[1] - conv_.before[1];
      const bool inside = left >= 0 && left + reach < extent.width;
      if (!inside || known < 0) {
        point(from, extent, top, left, outside.data(), taps.data());
        known = inside ? column : -1;
      }
      const int64_t shift = inside ? (column - known) * conv_.stride[1] * conv_.inputs : 0;
      const int64_t last = std::min(bottom, extent.height - 1) * extent.width + std::min(left + reach, extent.width - 1);
      const bool behind = end - from >= last * conv_.inputs + kBytes && stop - to >= kBytes;
      const bool whole = conv_.inputs >= kBytes || behind;
      for (int64_t block = 0; block < blocks_; ++block) multiply(taps.data(), shift, block, whole, to + first(block));
    }
    look_up_row(start, extent.columns);
  }

  // Sets the pointers to the pixels under a kernel whose first corner is at a row and a column of the image.
  void point(const uint8_t* from, const Extent& extent, int64_t top, int64_t left, const uint8_t* outside,
             const uint8_t** taps) const {
    for (int64_t ky = 0; ky < conv_.kernel[0]; ++ky) {
      const int64_t yy = top + ky * conv_.dilation[0];
      for (int64_t kx = 0; kx < conv_.kernel[1]; ++kx) {
        const int64_t xx = left + kx * conv_.dilation[1];
        const bool inside = yy >= 0 && yy < extent.height && xx >= 0 && xx < extent.width;
        *taps++ = inside ? from + (yy * extent.width + xx) * conv_.inputs : outside;
      }
    }
    for (int64_t tap = conv_.taps(); tap < 4 * quads_; ++tap, ++taps) *taps = taps[-tap];  // its weights are 0
  }

  // Looks up the results of some pixels.
  void look_up_row(uint8_t* to, int64_t pixels) const {
    if (conv_.table.size() == 256) look_up(to, to, pixels * conv_.inputs, conv_.table.data());
    for (int64_t pixel = 0; conv_.table.size() > 256 && pixel < pixels; ++pixel, to += conv_.inputs)
      for (int64_t c = 0; c < conv_.inputs; ++c) to[c] = conv_.table[256 * c + to[c]];
  }

  // The pointers are moved by `shift` bytes.
  void multiply(const uint8_t* const* taps, int64_t shift, int64_t block, bool whole, uint8_t* to) const {
    if (narrow_[block])
      whole ? product<true, true>(taps, shift, block, to) : product<true, false>(taps, shift, block, to);
    else
      whole ? product<false, true>(taps, shift, block, to) : product<false, false>(taps, shift, block, to);
  }

  // `Whole`: all bytes of a vector may be read and written, also those of channels that a pixel does not have.
  template <bool Narrow, bool Whole>
  void product(const uint8_t* const* taps, int64_t shift, int64_t block, uint8_t* to) const {
    const uint8_t* w = &weights_[block * quads_ * 4 * kBytes];
    const int64_t count = channels(), offset = first(block) + shift, place = block * kBytes;
    Ints sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = load_ints(&sums_[place + i * kLanes]);
    for (int64_t quad = 0; quad < quads_; ++quad, w += 4 * kBytes) {
      Bytes x[4], turned[4];
      for (int i = 0; i < 4; ++i) {
        const uint8_t* from = taps[4 * quad + i] + offset;
        x[i] = Whole ? load_bytes(from) : load_some(from, count);
      }
      transpose(x, turned);
      for (int i = 0; i < 4; ++i) {
        const Bytes weights = load_bytes(w + i * kBytes);
        sum[i] = Narrow ? dot_narrow(sum[i], turned[i], weights) : dot(sum[i], turned[i], weights);
      }
    }
    const Bytes made = conv_.curve.empty() ? requantize(sum, place) : follow_curve(sum, place);
    Whole ? store_bytes(to, made) : store_some(to, made, count);
  }

  Bytes requantize(Ints (&sum)[4], int64_t place) const {
    const float least = static_cast<float>(-conv_.y_zero), most = static_cast<float>(255 - conv_.y_zero);
    for (int i = 0; i < 4; ++i) sum[i] = rounded(scaled(sum[i], &multiplier_[place + i * kLanes]), least, most);
    return narrow(sum, conv_.y_zero);
  }

  Bytes follow_curve(Ints (&sum)[4], int64_t place) const {
    const Curve curve(conv_.curve);
    for (int i = 0; i < 4; ++i) {
      const Floats multiplier = load_floats(&multiplier_[place + i * kLanes]);
      sum[i] = rounded(curve(times_plus(floats(sum[i]), multiplier, fill_floats(conv_.offset))), 0, 255);
    }
    return narrow(sum, 0);
  }

  Convolution conv_;
  int64_t quads_, blocks_;  // quads of taps, vectors of channels
  std::vector<uint8_t> weights_;
  std::vector<int32_t> sums_;  // the bias without the parts of x_zero and kOffset, in the order of `transpose`
  std::vector<float> multiplier_;
  std::vector<bool> narrow_;  // by block: whether `dot_narrow` is exact
};

}  // namespace requant::REQUANT_TARGET
