// Convolution of each channel with a kernel of its own.
//
// A vector holds as many neighbouring bytes of a row of the image as it has, of one pixel or of several. Four rows at a
// time are transposed, so that the four bytes of a group belong to one channel, and multiplied by weights that were
// transposed in the same way when they were packed. The same four rows serve several rows of the result: each has weights
// of its own, which are 0 for rows that it does not read.
//
// With stride 1, a row of results is one long run of bytes, as the rows of the image under it are. The weights repeat with
// the channels; a period is the number of pixels after which vectors begin with the same channel again. With other
// strides, or with so many channels that the weights of a period would be large, a period is one pixel, and the last
// vector of a pixel begins earlier and computes some channels again.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>

#include "border.h"
#include "curve.h"
#include "scaled.h"
#include "tables.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

class Depthwise final : public ConvolutionKernel {
 public:
  explicit Depthwise(Convolution made) : conv_(std::move(made)), curve_(conv_.curve), rows_(best_rows()), quads_(quads_of(rows_)) {
    const int64_t channels = conv_.inputs, pixels = kBytes / std::gcd<int64_t>(channels, kBytes);
    const bool flat = conv_.stride[1] == 1 && pixels * channels / kBytes * block_bytes() <= kWeights;
    period_ = flat ? pixels : 1;
    blocks_ = divided(period_ * channels, kBytes);
    for (int64_t block = 0; block < blocks_; ++block) pack(block);
    weights_.shrink_to_fit();
    conv_.weights = {};
  }

  void run(const uint8_t* x, const uint8_t*, uint8_t* y, const Extent& extent, const Parallel& parallel) const override {
    const int64_t line = (extent.width + conv_.kernel[1] * conv_.dilation[1]) * conv_.inputs;
    const int64_t most = std::clamp<int64_t>(kBorder / line / conv_.stride[0], 1, std::max<int64_t>(kWork / line, 1));
    const int64_t even = divided(extent.rows, divided(extent.rows, most));  // rows of a band, if all have the same number
    const int64_t rows = divided(even, rows_) * rows_, bands = divided(extent.rows, rows);
    parallel(static_cast<size_t>(extent.batch * bands), [&](size_t index) {
      const int64_t image = static_cast<int64_t>(index) / bands, first = static_cast<int64_t>(index) % bands * rows;
      const Band band{first, std::min(rows, extent.rows - first)};
      const uint8_t* from = x + image * extent.height * extent.width * conv_.inputs;
      compute(from, extent, band, y + (image * extent.rows + first) * extent.columns * conv_.inputs);
    });
  }

 private:
  // Some rows of the result.
  struct Band {
    int64_t first, rows;
  };

  static constexpr int64_t kBorder = 1 << 17;   // bytes of a copy with a border, about: they stay in the second cache
  static constexpr int64_t kWork = 1 << 16;     // bytes of the results of one task, about
  static constexpr int64_t kWeights = 1 << 16;  // bytes of the weights of a period

  // ---------------------------------------------------------------------------------------------------- weights

  // Returns how many quads of rows a kernel column has if some rows of the result are computed together.
  int64_t quads_of(int64_t rows) const {
    return ((rows - 1) * conv_.stride[0] + conv_.kernel[0] + 3) / 4;
  }

  // Returns how many rows of the result are computed together: what takes the fewest instructions. A quad has eight to
  // transpose it, and four to multiply it for each row.
  int64_t best_rows() const {
    int64_t best = 1;
    for (int64_t rows = 2; rows <= kTogether && conv_.dilation[0] == 1; rows *= 2)
      if (quads_of(rows) * (8 + 4 * rows) * best < quads_of(best) * (8 + 4 * best) * rows) best = rows;
    return best;
  }

  int64_t block_bytes() const { return conv_.kernel[1] * quads_ * rows_ * 4 * kBytes; }

  // Returns the first byte of a block in its period.
  int64_t start(int64_t block) const {
    return std::max<int64_t>(0, std::min(block * kBytes, period_ * conv_.inputs - kBytes));
  }

  void pack(int64_t block) {
    bool narrow = true;
    for (int64_t kx = 0; kx < conv_.kernel[1]; ++kx)
      for (int64_t quad = 0; quad < quads_; ++quad)
        for (int64_t row = 0; row < rows_; ++row) narrow = pack_quad(block, kx, quad, row) && narrow;
    narrow_.push_back(narrow);
    uint8_t lane[4][kBytes];
    Aligned<uint8_t> order;  // the byte of each group of four
    for (auto& each : lane) std::iota(each, each + kBytes, static_cast<uint8_t>(0));
    append(lane, order);
    for (int group = 0; group < kBytes; ++group) {
      const int64_t channel = (start(block) + order[4 * group]) % conv_.inputs, taps = conv_.taps();
      const int32_t sum = std::accumulate(&conv_.weights[channel * taps], &conv_.weights[channel * taps] + taps, int32_t{0});
      sums_.push_back(conv_.bias[channel] - (conv_.x_zero - kOffset) * sum);
      multiplier_.push_back(conv_.multiplier[channel]);
    }
  }

  // Packs the weights with which a row of the result reads four rows of the image; returns whether they fit `dot_narrow`.
  bool pack_quad(int64_t block, int64_t kx, int64_t quad, int64_t row) {
    bool narrow = true;
    uint8_t lane[4][kBytes] = {};
    for (int64_t j = 0; j < kBytes; ++j) {
      const int64_t channel = (start(block) + j) % conv_.inputs;
      int8_t four[4] = {};
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t ky = 4 * quad + i - row * conv_.stride[0];
        if (ky >= 0 && ky < conv_.kernel[0]) four[i] = conv_.weights[channel * conv_.taps() + ky * conv_.kernel[1] + kx];
        lane[i][j] = static_cast<uint8_t>(four[i]);
      }
      narrow = narrow && fits_narrow(four);
    }
    append(lane, weights_);
    return narrow;
  }

  static void append(const uint8_t (&lane)[4][kBytes], Aligned<uint8_t>& to) {
    const Bytes in[4] = {load_bytes(lane[0]), load_bytes(lane[1]), load_bytes(lane[2]), load_bytes(lane[3])};
    Bytes out[4];
    transpose(in, out);
    to.resize(to.size() + 4 * kBytes);
    for (int i = 0; i < 4; ++i) store_bytes(to.data() + to.size() - (4 - i) * kBytes, out[i]);
  }

  // --------------------------------------------------------------------------------------------------- products

  // Computes a band; `to` is its first result.
  void compute(const uint8_t* image, const Extent& extent, const Band& band, uint8_t* to) const {
    const int64_t whole = divided(band.rows, rows_) * rows_;  // rows behind the band are computed and not written
    Region region = seen(conv_, band.first, whole, 0, extent.columns);
    region.rows = (whole - rows_) * conv_.stride[0] + (4 * quads_ - 1) * conv_.dilation[0] + 1;  // to the end of the last quad
    const uint8_t* from = bordered(image, extent, conv_.inputs, region, conv_.x_zero, kBytes);
    const int64_t line = region.columns * conv_.inputs, width = extent.columns * conv_.inputs;
    for (int64_t block = 0; block < blocks_; ++block)
      for (int64_t row = 0; row < band.rows; row += rows_) {
        const Rows rows{from + row * conv_.stride[0] * line, line, to + row * width, width, std::min(rows_, band.rows - row)};
        switch (rows_) {
          case 1: compute_rows<1>(rows, block); break;
          case 2: compute_rows<2>(rows, block); break;
          default: compute_rows<kTogether>(rows, block);
        }
      }
    look_up_all(conv_, to, band.rows * extent.columns, 0, conv_.inputs);
  }

  // Some rows of the result, their bytes, how many there are, and the rows of the image from the first that they read.
  struct Rows {
    const uint8_t* from;
    int64_t line;
    uint8_t* to;
    int64_t width, count;
  };

  // Computes all vectors of a block in some rows.
  template <int Together>
  void compute_rows(const Rows& rows, int64_t block) const {
    const int64_t first = start(block), step = period_ * conv_.inputs, moved = step * conv_.stride[1];
    const uint8_t* from = rows.from + first;
    for (int64_t at = first; at < rows.width; at += step, from += moved) {
      const int64_t count = std::min<int64_t>({kBytes, rows.width - at, step});
      if constexpr (kHasNarrow)
        narrow_[block] ? product<true, Together>(rows, from, block, at, count) : product<false, Together>(rows, from, block, at, count);
      else
        product<false, Together>(rows, from, block, at, count);
    }
  }

  // Computes `count` neighbouring results in some rows, and writes them `at` bytes behind the beginning of each.
  template <bool Narrow, int Together>
  void product(const Rows& rows, const uint8_t* from, int64_t block, int64_t at, int64_t count) const {
    const uint8_t* w = &weights_[block * block_bytes()];
    const int64_t place = block * kBytes;
    Ints sum[Together][4];
#pragma unroll
    for (int row = 0; row < Together; ++row)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[row][i] = load_ints(&sums_[place + i * kLanes]);
    for (int64_t kx = 0; kx < conv_.kernel[1]; ++kx, from += conv_.dilation[1] * conv_.inputs) {
      const uint8_t* x = from;
      for (int64_t quad = 0; quad < quads_; ++quad, w += Together * 4 * kBytes) {
        Bytes four[4], turned[4];
#pragma unroll
        for (int i = 0; i < 4; ++i, x += rows.line * conv_.dilation[0]) four[i] = load_bytes(x);
        transpose(four, turned);
#pragma unroll
        for (int row = 0; row < Together; ++row)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Bytes weights = load_bytes(w + (4 * row + i) * kBytes);
            sum[row][i] = Narrow ? dot_narrow(sum[row][i], turned[i], weights) : dot(sum[row][i], turned[i], weights);
          }
      }
    }
    uint8_t* to = rows.to + at;
#pragma unroll
    for (int row = 0; row < Together; ++row, to += rows.width) {
      if (row >= rows.count) return;
      const Bytes made = conv_.curve.empty() ? requantized<false>(sum[row], place) : requantized<true>(sum[row], place);
      count == kBytes ? store_bytes(to, made) : store_some(to, made, count);
    }
  }

  // Returns the results of some sums. They stay in registers, because nothing takes their address.
  template <bool Curved>
  REQUANT_INLINE Bytes requantized(const Ints (&sum)[4], int64_t place) const {
    Floats value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* multiplier = &multiplier_[place + i * kLanes];
      value[i] = Curved ? times_plus(floats(sum[i]), load_floats(multiplier), fill_floats(conv_.offset)) : scaled(sum[i], multiplier);
    }
    return Curved ? curve_.bytes_of(value) : rounded_bytes(value, conv_.y_zero);
  }

  Convolution conv_;
  Curve curve_;
  int64_t rows_, quads_;         // rows of the result that are computed together, and quads of rows under them
  int64_t period_ = 1;           // in pixels
  int64_t blocks_ = 0;           // vectors of a period
  Aligned<uint8_t> weights_; // by block, column of the kernel, quad and row of the result
  Aligned<int32_t> sums_;    // the bias without the parts of x_zero and kOffset, in the order of `transpose`
  Aligned<float> multiplier_;
  std::vector<bool> narrow_;  // by block: whether `dot_narrow` is exact
};

}  // namespace requant::REQUANT_TARGET
