// Convolution of each channel with a kernel of its own.
//
// A vector holds as many neighbouring bytes of a row of the image as it has, of one pixel or of several. Four rows at a
// time are transposed, so that the four bytes of a group belong to one channel, and multiplied by weights that were
// transposed in the same way when they were packed. The same four rows serve several rows of the result: each has weights
// of its own, which are 0 for rows that it does not read.
//
// A period is the number of pixels after which vectors begin with the same channel again. It is one pixel where kernels have
// three columns: then neighbouring results share transposed columns, which stay in registers. With more columns they are too
// many for registers: those of some pixels, a strip, are transposed into the nearest cache first. It is one pixel with strides,
// too, and with so many channels that the weights of a period would be large. The last vector of a pixel begins earlier, and
// computes some channels again. Where these are many, a row of results is one long run of bytes, as the rows of the image under
// it are.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>

#include "border.h"
#include "curve.h"
#include "scaled.h"
#include "tables.h"
#include "target.h"
#include "threads.h"

namespace requant::REQUANT_TARGET {

class Depthwise final : public ConvolutionKernel {
 public:
  explicit Depthwise(Convolution made)
      : conv_(std::move(made)), curve_(conv_.curve), rows_(best_rows()), quads_(quads_of(rows_)) {
    const int64_t channels = conv_.inputs, pixels = kBytes / std::gcd<int64_t>(channels, kBytes);
    const bool flat = conv_.stride[1] == 1 && pixels * channels / kBytes * block_bytes() <= kWeights;
    period_ = flat && !strips() && (!slides() || wasteful()) ? pixels : 1;
    blocks_ = divided(period_ * channels, kBytes);
    for (int64_t block = 0; block < blocks_; ++block) pack(block);
    weights_.shrink_to_fit();
    free_memory(conv_.weights);
  }

  void run(const uint8_t* x, const uint8_t*, uint8_t* y, const Extent& extent, const Parallel& parallel) const override {
    // Strips read the large weights of a block in each band.
    const int64_t work = strips() && !has_several_threads() ? 4 * kWork : kWork;
    const int64_t most = std::max<int64_t>(work / (extent.columns * conv_.inputs), 1);
    const int64_t even = divided(extent.rows, divided(extent.rows, most));  // rows of a band, if all have the same number
    const int64_t rows = divided(even, rows_) * rows_, bands = divided(extent.rows, rows);
    parallel(static_cast<size_t>(extent.batch * bands), [&](size_t index) {
      const int64_t image = static_cast<int64_t>(index) / bands, first = static_cast<int64_t>(index) % bands * rows;
      const uint8_t* from = x + image * extent.height * extent.width * conv_.inputs;
      uint8_t* to = y + image * extent.rows * extent.columns * conv_.inputs;
      compute({from, to, extent}, {first, std::min(rows, extent.rows - first)});
    });
  }

 private:
  // One image and its results.
  struct Image {
    const uint8_t* from;
    uint8_t* to;
    const Extent& extent;
  };

  // Some rows or columns of the result.
  struct Span {
    int64_t first, count;
    int64_t end() const { return first + count; }
  };

  static constexpr int64_t kWork = 1 << 14;     // bytes of the results of one task, about
  static constexpr int64_t kWeights = 1 << 16;  // bytes of the weights of a period
  static constexpr int64_t kStrip = 16;         // pixels whose transposed columns stay in the nearest cache

  // ---------------------------------------------------------------------------------------------------- weights

  // Returns how many quads of rows a kernel column has if some rows of the result are computed together.
  int64_t quads_of(int64_t rows) const {
    return ((rows - 1) * conv_.stride[0] + conv_.kernel[0] + 3) / 4;
  }

  // Returns how many rows of the result are computed together: what takes the fewest instructions. A quad of a column has four
  // to multiply it for each row, and eight to transpose it: for each column of the kernel, or, with loads and stores, once.
  int64_t best_rows() const {
    const int64_t turned = strips() ? 16 * conv_.stride[1] : 8 * conv_.kernel[1];
    const auto cost = [&](int64_t rows) { return quads_of(rows) * (turned + 4 * rows * conv_.kernel[1]); };
    int64_t best = 1;
    for (int64_t rows = 2; rows <= kTogether && conv_.dilation[0] == 1; rows *= 2)
      if (cost(rows) * best < cost(best) * rows) best = rows;
    return best;
  }

  // Whether neighbouring results share columns of the kernel that stay in registers.
  bool slides() const {
    return kSlides && conv_.kernel[1] == 3 && conv_.dilation[1] == 1 && quads_ == 1 && rows_ == 3 - conv_.stride[1];
  }

  // Whether vectors that belong to one pixel each compute many channels twice.
  bool wasteful() const { return 8 * divided(conv_.inputs, kBytes) * kBytes > 11 * conv_.inputs; }

  // Whether columns are transposed before they are multiplied: they are too many for registers.
  bool strips() const { return kSlides && conv_.kernel[1] > 3 && conv_.inputs >= kBytes && !wasteful(); }

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

  // Computes a band of rows. Kernels inside of the image read it as it is, the others read a copy with a border.
  void compute(const Image& image, const Span& band) const {
    const Span all{0, image.extent.columns};
    if constexpr (kSlides)
      if (strips()) {
        rows_ == 1 ? compute_strips<1>(image, band) : compute_strips<2>(image, band);
        return look_up_all(conv_, to(image, band, all), band.count * all.count, 0, conv_.inputs);
      }
    const Span rows = inner_rows(image.extent, band), columns = inner_columns(image.extent);
    compute_copy(image, {band.first, rows.first - band.first}, all);
    compute_copy(image, rows, {0, columns.first});
    compute_inner(image, rows, columns);
    compute_copy(image, rows, {columns.end(), all.end() - columns.end()});
    compute_copy(image, {rows.end(), band.end() - rows.end()}, all);
    look_up_all(conv_, to(image, band, all), band.count * all.count, 0, conv_.inputs);
  }

  uint8_t* to(const Image& image, const Span& rows, const Span& columns) const {
    return image.to + (rows.first * image.extent.columns + columns.first) * conv_.inputs;
  }

  // Returns the rows of the image under rows of the result that are computed together: to the end of the last quad.
  int64_t rows_under() const { return (4 * quads_ - 1) * conv_.dilation[0] + 1; }

  // Returns the rows of a band, groups that are computed together, that read inside of the image. Vectors read behind their
  // pixels, so that there is another row behind the last one.
  Span inner_rows(const Extent& extent, const Span& band) const {
    if (extent.width * conv_.inputs < kBytes) return {band.first, 0};
    const int64_t outside = divided(conv_.before[0], conv_.stride[0]) - band.first;
    const int64_t first = band.first + divided(std::max<int64_t>(outside, 0), rows_) * rows_;
    const int64_t room = extent.height - 1 - rows_under() + conv_.before[0];
    if (first >= band.end() || room < first * conv_.stride[0]) return {std::min(first, band.end()), 0};
    const int64_t groups = (room / conv_.stride[0] - first) / rows_ + 1;
    return {first, std::min(groups * rows_, band.end() - first)};
  }

  // Returns the columns of the result whose kernels are inside of the image.
  Span inner_columns(const Extent& extent) const {
    const int64_t first = std::min(divided(conv_.before[1], conv_.stride[1]), extent.columns);
    const int64_t room = extent.width + conv_.before[1] - (conv_.kernel[1] - 1) * conv_.dilation[1] - 1;
    return {first, room < 0 ? 0 : std::clamp<int64_t>(room / conv_.stride[1] + 1 - first, 0, extent.columns - first)};
  }

  void compute_inner(const Image& image, const Span& rows, const Span& columns) const {
    const auto [top, left, height, width] = seen(conv_, rows.first, rows.count, columns.first, columns.count);
    const int64_t line = image.extent.width * conv_.inputs;
    compute_from(image.from + top * line + left * conv_.inputs, line, image, rows, columns);
  }

  void compute_copy(const Image& image, const Span& rows, const Span& columns) const {
    if (rows.count == 0 || columns.count == 0) return;
    const int64_t whole = divided(rows.count, rows_) * rows_;  // rows behind the span are computed and not written
    Region region = seen(conv_, rows.first, whole, columns.first, columns.count);
    region.rows = (whole - rows_) * conv_.stride[0] + rows_under();
    const uint8_t* from = bordered(image.from, image.extent, conv_.inputs, region, conv_.x_zero, kBytes);
    compute_from(from, region.columns * conv_.inputs, image, rows, columns);
  }

  // Computes results from what their kernels see: the first byte, and the bytes from one row to the next.
  void compute_from(const uint8_t* from, int64_t line, const Image& image, const Span& rows, const Span& columns) const {
    const int64_t width = columns.count * conv_.inputs, pitch = image.extent.columns * conv_.inputs;
    for (int64_t block = 0; block < blocks_; ++block)
      for (int64_t row = 0; row < rows.count; row += rows_) {
        uint8_t* const first = to(image, {rows.first + row, 0}, columns);
        const Rows some{from + row * conv_.stride[0] * line, line, width, {first, pitch, std::min(rows_, rows.count - row)}};
        if constexpr (kSlides)
          if (period_ == 1 && slides()) {
            rows_ == 2 ? slide<2, 1>(some, block) : slide<1, 2>(some, block);
            continue;
          }
        switch (rows_) {
          case 1: compute_rows<1>(some, block); break;
          case 2: compute_rows<std::min(2, kTogether)>(some, block); break;
          default: compute_rows<kTogether>(some, block);
        }
      }
  }

  // Where some rows of the result go: the first one, the bytes from one to the next, and how many there are.
  struct Results {
    uint8_t* to;
    int64_t pitch, count;
  };

  // Some rows of the result, and what they see: the first byte, and the bytes from one row of it to the next. `width` are the
  // bytes of a row of the result.
  struct Rows {
    const uint8_t* from;
    int64_t line, width;
    Results results;
  };

  // Computes all vectors of a block in some rows.
  template <int Together>
  void compute_rows(const Rows& rows, int64_t block) const {
    const int64_t first = start(block), step = period_ * conv_.inputs, moved = step * conv_.stride[1];
    const uint8_t* from = rows.from + first;
    for (int64_t at = first; at < rows.width; at += step, from += moved) {
      const int64_t count = std::min<int64_t>({kBytes, rows.width - at, step});
      if constexpr (kHasNarrow)
        narrow_[block] ? product<true, Together>(rows, from, block, at, count)
                       : product<false, Together>(rows, from, block, at, count);
      else
        product<false, Together>(rows, from, block, at, count);
    }
  }

  // Computes a vector of channels of all pixels in some rows. Pixels share two columns of the image with stride 1, and one with
  // stride 2: these are transposed once.
  template <int Together, int Stride>
  void slide(const Rows& rows, int64_t block) const {
    constexpr int kKept = 3 - Stride;
    const int64_t first = start(block), pixel = conv_.inputs, place = block * kBytes, count = std::min<int64_t>(kBytes, pixel);
    const uint8_t *from = rows.from + first, *const w = &weights_[block * block_bytes()];
    Bytes column[3][4];
    for (int kx = 0; kx < kKept; ++kx) load_turned(from + kx * pixel, rows.line, column[kx]);
    for (int64_t at = first; at < rows.width; at += pixel, from += Stride * pixel) {
#pragma unroll
      for (int kx = kKept; kx < 3; ++kx) load_turned(from + kx * pixel, rows.line, column[kx]);
      Ints sum[Together][4];
#pragma unroll
      for (int row = 0; row < Together; ++row)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[row][i] = load_ints(&sums_[place + i * kLanes]);
#pragma unroll
          for (int kx = 0; kx < 3; ++kx)
            sum[row][i] = dot(sum[row][i], column[kx][i], load_bytes(w + ((kx * Together + row) * 4 + i) * kBytes));
        }
      write(sum, rows.results, at, place, count);
#pragma unroll
      for (int kx = 0; kx < kKept; ++kx)
#pragma unroll
        for (int i = 0; i < 4; ++i) column[kx][i] = column[kx + Stride][i];
    }
  }

  REQUANT_INLINE void load_turned(const uint8_t* x, int64_t line, Bytes (&turned)[4]) const {
    Bytes four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i, x += line * conv_.dilation[0]) four[i] = load_bytes(x);
    transpose(four, turned);
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
        Bytes turned[4];
        load_turned(x, rows.line, turned);
        x += 4 * rows.line * conv_.dilation[0];
#pragma unroll
        for (int row = 0; row < Together; ++row)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Bytes weights = load_bytes(w + (4 * row + i) * kBytes);
            sum[row][i] = Narrow ? dot_narrow(sum[row][i], turned[i], weights) : dot(sum[row][i], turned[i], weights);
          }
      }
    }
    write(sum, rows.results, at, place, count);
  }

  // ------------------------------------------------------------------------------------------------------ strips

  // The weights of a block for some of the rows of results that are computed together: those from `below` on.
  struct Weights {
    int64_t block, below;
  };

  // Computes a band of rows, strips of pixels: their columns are transposed, then multiplied.
  template <int Together>
  void compute_strips(const Image& image, const Span& band) const {
    const int64_t columns = image.extent.columns, line = columns * conv_.inputs;
    for (int64_t block = 0; block < blocks_; ++block)
      for (int64_t row = band.first; row < band.end(); row += rows_)
        for (int64_t first = 0; first < columns; first += kStrip) {
          const Span strip{first, std::min(kStrip, columns - first)};
          const uint8_t* turned = turned_columns(image, row, strip, start(block));
          for (int64_t below = 0; below < std::min(rows_, band.end() - row); below += Together) {
            const int64_t at = row + below, count = std::min<int64_t>(Together, band.end() - at);
            multiply_strip<Together>(turned, {block, below}, {image.to + at * line, line, count}, strip);
          }
        }
  }

  int64_t column_bytes() const { return quads_ * 4 * kBytes; }  // of a transposed column

  // Transposes the columns of the image under a strip of results: a vector of channels, from the rows under `row` on.
  const uint8_t* turned_columns(const Image& image, int64_t row, const Span& strip, int64_t channel) const {
    thread_local Scratch scratch;
    const auto [top, left, height, width] = seen(conv_, row, 1, strip.first, strip.count);
    uint8_t* const turned = scratch.bytes((width + conv_.stride[1]) * column_bytes());  // pixels are multiplied in pairs
    uint8_t* to = turned;
    for (int64_t column = left; column < left + width; ++column)
      for (int64_t quad = 0; quad < quads_; ++quad, to += 4 * kBytes) {
        Bytes four[4], made[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = pixel(image, top + (4 * quad + i) * conv_.dilation[0], column, channel);
        transpose(four, made);
#pragma unroll
        for (int i = 0; i < 4; ++i) store_bytes(to + i * kBytes, made[i]);
      }
    return turned;
  }

  // Returns a vector of channels of a pixel; outside of the image it is the zero point.
  REQUANT_INLINE Bytes pixel(const Image& image, int64_t row, int64_t column, int64_t channel) const {
    const int64_t height = image.extent.height, width = image.extent.width;
    if (row < 0 || row >= height || column < 0 || column >= width) return fill(static_cast<uint8_t>(conv_.x_zero));
    return load_bytes(image.from + (row * width + column) * conv_.inputs + channel);
  }

  template <int Together>
  void multiply_strip(const uint8_t* turned, const Weights& weights, const Results& to, const Span& strip) const {
    const int64_t moved = 2 * conv_.stride[1] * column_bytes();
    int64_t at = strip.first * conv_.inputs + start(weights.block);
    for (int64_t left = strip.count; left > 0; left -= 2, turned += moved, at += 2 * conv_.inputs)
      multiply_pair<Together>(turned, weights, to, at, left > 1);
  }

  // Computes the results of one or two neighbouring pixels in some rows, which share weights, and writes them `at` bytes behind
  // the beginning of each.
  template <int Together>
  REQUANT_INLINE void multiply_pair(const uint8_t* turned, const Weights& weights, const Results& to, int64_t at,
                                    bool both) const {
    const int64_t next = conv_.stride[1] * column_bytes(), place = weights.block * kBytes;
    const uint8_t* w = &weights_[weights.block * block_bytes() + weights.below * 4 * kBytes];
    Ints one[Together][4], other[Together][4];
#pragma unroll
    for (int row = 0; row < Together; ++row)
#pragma unroll
      for (int i = 0; i < 4; ++i) one[row][i] = other[row][i] = load_ints(&sums_[place + i * kLanes]);
    for (int64_t kx = 0; kx < conv_.kernel[1]; ++kx, turned += conv_.dilation[1] * column_bytes()) {
      const uint8_t* x = turned;
      for (int64_t quad = 0; quad < quads_; ++quad, x += 4 * kBytes, w += rows_ * 4 * kBytes)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Bytes left = load_bytes(x + i * kBytes), right = load_bytes(x + next + i * kBytes);
#pragma unroll
          for (int row = 0; row < Together; ++row) {
            const Bytes taps = load_bytes(w + (4 * row + i) * kBytes);
            one[row][i] = dot(one[row][i], left, taps);
            other[row][i] = dot(other[row][i], right, taps);
          }
        }
    }
    write(one, to, at, place, kBytes);
    if (both) write(other, to, at + conv_.inputs, place, kBytes);
  }

  // ----------------------------------------------------------------------------------------------------- results

  template <int Together>
  REQUANT_INLINE void write(const Ints (&sum)[Together][4], const Results& results, int64_t at, int64_t place,
                            int64_t count) const {
    uint8_t* to = results.to + at;
#pragma unroll
    for (int row = 0; row < Together; ++row, to += results.pitch) {
      if (row >= results.count) return;
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
      value[i] = Curved ? times_plus(floats(sum[i]), load_floats(multiplier), fill_floats(conv_.offset))
                        : scaled(sum[i], multiplier);
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
