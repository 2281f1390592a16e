// What is compiled once for each instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "function_ref.h"

// For functions with arrays of vectors, which stay in registers only within one function.
#define REQUANT_INLINE inline __attribute__((always_inline))

// For loops that gain nothing from being unrolled by the compiler: it would only make the library larger.
#define REQUANT_ROLLED _Pragma("clang loop unroll(disable)")

namespace requant {

// How a kernel moves over an image: sizes by axis, height and width.
struct Window {
  int64_t kernel[2] = {1, 1}, stride[2] = {1, 1}, dilation[2] = {1, 1};
  int64_t before[2] = {0, 0}, after[2] = {0, 0};  // padding
  int64_t taps() const { return kernel[0] * kernel[1]; }
  // The length of an axis of the result; 0 if the padded input is shorter than the kernel.
  int64_t length(int axis, int64_t input) const {
    const int64_t reach = dilation[axis] * (kernel[axis] - 1) + 1, padded = before[axis] + input + after[axis];
    return padded < reach ? 0 : (padded - reach) / stride[axis] + 1;
  }
};

constexpr int64_t kDeepest = INT32_MAX / (255 * 128);  // products of a result: int32 holds all sums. DEEPEST in Python
constexpr double kMost = 0x1p30;  // numbers below it are rounded in int32
constexpr int kSegmentBits = 6, kSegments = 1 << kSegmentBits;  // of a curve
constexpr int kStepBits = 6;                                   // of a step of the result, in a curve

// A convolution with all that is constant: uint8 NHWC to uint8 NHWC.
//
//   v = multiplier * (bias + sum (x - x_zero) * w) + residual_ratio * (r - residual_zero)
//   y = table[clip(rint(v) + y_zero, 0, 255)]
//
// `rint` rounds half to even. Without a table the clipped value is the result. The residual r has the shape of y; without
// one its term is 0. A depthwise convolution has none. With a curve, v is rounded only behind the function of the curve,
// which is a line in each of 64 segments. It computes in 16 bits:
//
//   t = clip(rint(v + offset), -2^15, 2^15 - 1)     the segment s is t / 2^10 + 32, and t mod 2^10 the place in it
//   d = 2^6 (t mod 2^10 - 2^9)                      from the middle of the segment: -1 to 1 in units of 2^-15
//   y = clip((curve[0, s] + (curve[1, s] * d + 2^14) / 2^15) / 2^6, 0, 255)
//
// `/` rounds down, and the sum is clipped to 16 bits. Each product and the sum behind it, and multiplier * (...) + offset, are
// rounded once to float.
struct Convolution : Window {
  int64_t inputs = 0, outputs = 0, group = 1;  // channels
  int x_zero = 0, y_zero = 0, residual_zero = 0;
  float residual_ratio = 0;        // of scales, r to v
  std::vector<int8_t> weights;     // (outputs, inputs / group, kernel[0], kernel[1])
  std::vector<int32_t> bias;       // (outputs,)
  std::vector<float> multiplier;   // (outputs,)
  std::vector<uint8_t> table;      // (256,), (outputs, 256) or empty
  std::vector<int16_t> curve;      // (2, kSegments) or empty: in the middle, and what half a segment adds; above -2^15
  float offset = 0;
  bool depthwise() const { return group == inputs && inputs == outputs && group > 1; }
  // The taps of a patch are runs of neighbouring bytes of the image: so many in a row of the kernel.
  int64_t runs_across() const { return group == 1 && dilation[1] == 1 ? 1 : kernel[1]; }
  int64_t runs() const { return kernel[0] * runs_across(); }
  int64_t run_bytes() const { return taps() / runs() * (inputs / group); }
  // Whether int32 holds all rounded v, of any x. All instruction sets but the portable one need that.
  bool fits() const {
    const size_t depth = weights.size() / bias.size();
    double most = 0;
    for (size_t o = 0; o < bias.size(); ++o) {
      int64_t sum = 0;
      for (size_t i = o * depth; i < (o + 1) * depth; ++i) sum += std::abs(weights[i]);
      most = std::max(most, (255.0 * static_cast<double>(sum) + std::abs(static_cast<double>(bias[o]))) * multiplier[o]);
    }
    return most + std::abs(offset) + 255.0 * residual_ratio < kMost;
  }
  // Whether each result has one pixel, which stands at the same place of the image.
  bool pointwise() const {
    return taps() == 1 && stride[0] == 1 && stride[1] == 1 && !(before[0] | before[1] | after[0] | after[1]);
  }
};

// The sizes of one run: x is (batch, height, width, inputs), y (batch, rows, columns, outputs).
struct Extent {
  int64_t batch, height, width, rows, columns;
  // Bytes from one row of y to the next, for a convolution with several channels in a group and no residual; 0: they follow each
  // other.
  int64_t down = 0;
};

inline int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }  // rounded up

// What is done for each index below a count, and a function that does so on several threads.
using Work = FunctionRef<void(size_t index)>;
using Parallel = FunctionRef<void(size_t count, const Work& work)>;

class ConvolutionKernel {
 public:
  virtual ~ConvolutionKernel() = default;
  // The residual may be null.
  virtual void run(const uint8_t* x, const uint8_t* residual, uint8_t* y, const Extent& extent,
                   const Parallel& parallel) const = 0;
};

// What is applied to the results of a product in float.
enum class Function : int64_t { kNone = 0, kRelu = 1, kGelu = 2, kGeluByTanh = 3, kSilu = 4 };

// The product of rows in float and a constant matrix, with all that is constant:
//
//   y[r, o] = f(step[r] * scale[o] * (sum of q[r, i] * w[o, i] - zero[r] * sum of w[o, i]) + bias[o]) + residual[r, o]
//
// q[r] are the values of row r, rounded to uint8: q = clip(rint(x / step) + zero). step is the 255th part of the smallest range
// that contains 0 and the row, and zero what 0 becomes. Both GELUs are exact to 3e-6, and x * sigmoid(x) to the last bits. With
// `gated` the residual is a gate: f(...) is multiplied by it.
struct Matrix {
  int64_t inputs = 0, outputs = 0;
  std::vector<int8_t> weights;     // (outputs, inputs)
  std::vector<float> scale, bias;  // (outputs,)
  Function function = Function::kNone;
  bool gated = false;
  // Whether int32 holds all sums.
  bool fits() const { return inputs <= kDeepest; }
};

// The product of rows in float and a constant matrix in blocks, with all that is constant:
//
//   y[r, o] = f(sum over all blocks b of step[r, b] * scale[o, b] * (sum of q[r, i] * (code[o, i] - zero)) + bias[o])
//             + residual[r, o]
//
// A block has `size` neighbouring inputs, the last one maybe fewer. q[r] are the values of row r, rounded to integers from -127
// to 127; step[r, b] is the 127th part of the largest magnitude in a block. zero is 2^(bits - 1).
struct BlockMatrix {
  int64_t inputs = 0, outputs = 0, bits = 8, size = 128;
  const uint8_t* codes = nullptr;  // (outputs, blocks, bytes); of two codes in a byte, the low one is the first
  const float* scale = nullptr;    // (outputs, blocks)
  std::vector<float> bias;         // (outputs,)
  Function function = Function::kNone;
  bool gated = false;  // as above

  int64_t blocks() const { return (inputs + size - 1) / size; }
  int64_t bytes() const { return size * bits / 8; }  // of a block
  int zero() const { return 1 << (bits - 1); }
};

class MatrixKernel {
 public:
  virtual ~MatrixKernel() = default;
  // x is (rows, inputs), y and the residual (rows, outputs). The residual may be null.
  virtual void run(const float* x, const float* residual, float* y, int64_t rows, const Parallel& parallel) const = 0;
};

// Neighbouring columns of a constant matrix of floats, whose product with a row is bias + sum x[i] * weights[i, c].
struct FloatPanel {
  const float* weights;             // (inputs, kFloatPanel), with 0 behind the last column
  const float* bias;                // (kFloatPanel,)
  int64_t inputs, columns, step;    // `step` floats lie between two rows of the result
};

constexpr int64_t kFloatPanel = 32;  // columns, at most

// What the next state of an item is made of, in a GRU with `size` values. x are the products of the input for z, r and n, side by
// side, and h those of the state for z and r. `last` is the product of the state for n; if the reset gate comes first, it is the
// product of r times the state.
//
//   z = sigmoid(x[z] + h[z]), r = sigmoid(x[r] + h[r]), n = tanh(x[n] + r * last), after = n + z * (before - n)
//
// If the reset gate comes first, n = tanh(x[n] + last). sigmoid and tanh are exact to 1e-4.
struct GruStep {
  const float *x, *h, *last, *before;
  int64_t size;
  bool reset_first;
};

// What the next state of an item is made of, in an LSTM with `size` values. x are the products of the input for i, o, f and c,
// side by side, and h those of the state; `cell` becomes the next one.
//
//   i, o, f = sigmoid(x + h), cell = f * cell + i * tanh(x[c] + h[c]), after = o * tanh(cell)
//
// sigmoid and tanh are exact to 1e-4.
struct LstmStep {
  const float *x, *h;
  float* cell;
  int64_t size;
};

// So few queries do not pay for the rounding of keys and values: their attention is computed in float.
constexpr int64_t kFewQueries = 4;

// The sizes of attention: softmax(scale * q k' + mask) v for one head, with q (queries, depth), k (keys, depth), v (keys, width).
struct AttentionSize {
  int64_t queries, keys, depth, width;  // keys and width are at least 1
  float scale;
  // How many keys the first query sees, at least 1; each query sees one more than the query before it, and at most all.
  int64_t first_seen;
  bool unseen_is_zero;                // whether a query is 0 whose mask is -infinity for all keys; otherwise it is NaN
  int64_t window = int64_t{1} << 62;  // how many keys a query sees at most: the last ones
  float cap = 0;                      // before the mask, scores become cap * tanh(score / cap); if it is 0 they stay
  int64_t seen_by(int64_t query) const { return std::min(keys, first_seen + query); }
  int64_t hidden_before(int64_t query) const { return std::max<int64_t>(0, first_seen + query - window); }
};

// Rows of a cache of keys or values, behind each other: each value is steps[row] * (byte - kCacheZero).
struct Cached {
  const uint8_t* bytes;
  const float* steps;

  Cached behind(int64_t rows, int64_t columns) const { return {bytes + rows * columns, steps + rows}; }
};

constexpr int kCacheZero = 128;

// One head; `step` is the number of floats from one row to the next. The masks are added to the scores, and may be null.
//
// A row of q is rounded as in a Matrix, a row of k and a column of v to integers from -127 to 127. A row of the softmax becomes
// rint(255 exp(score - greatest score)), and is divided by its sum after the product with v. exp is exact to 1e-4. Where that
// rounding changes the sum by more than a 32nd, the row has steps of a 256th of that. With few queries nothing is rounded.
struct Head {
  const float *q, *k, *v, *mask;
  float* y;
  int64_t q_step, k_step, v_step, mask_step, y_step;
  bool mask_repeats;       // whether a row of the mask has one value for all keys
  float sink = -INFINITY;  // a score of each row beside those of the keys: its share goes to no value
  Cached k_cache = {}, v_cache = {};  // k and v, where these are null; only for few queries
  const float* window = nullptr;      // a second mask, with a value for each query and key
  int64_t window_step = 0;
};

// How a row x becomes y = (x - mean) / sqrt(variance + epsilon) * scale + bias; for an RMS norm the mean counts as 0.
struct Normalization {
  std::vector<float> scale, bias;  // a value for each of the row
  float epsilon = 0;
  bool centred = true;
};

// A function of two uint8 tensors, element by element, with all that is constant:
//
//   sum:      y = clip(rint(ratio[0] * (a - zero[0]) + ratio[1] * (b - zero[1])) + y_zero)
//   product:  y = clip(rint((a - zero[0]) * (ratio[1] * (b - zero[1]))) + y_zero)
struct Pair {
  bool product;
  float ratio[2];
  int zero[2], y_zero;
  // Whether int32 holds the results before they are clipped. All instruction sets but the portable one need that.
  bool fits() const { return product ? 255.0 * 255.0 * ratio[1] < kMost : 255.0 * (ratio[0] + ratio[1]) < kMost; }
};

// Windows of an image that stand side by side: each has `down` rows of `across` pixels. The steps are in bytes: from one row of a
// window to the next, from one of its pixels to the next, and from one window to the next.
struct Windows {
  const uint8_t* first;
  size_t down, across, count;
  ptrdiff_t down_step, across_step, step;
  size_t pixels() const { return down * across; }
};

// How the sum of some pixels becomes their mean: y = clip(rint(multiplier * (sum - shift)) + y_zero).
struct Mean {
  float multiplier;
  int shift, y_zero;
};

// Planes of floats that become the channels of pixels: how many, `step` values from one to the next, and how values are rounded.
struct Planes {
  int64_t channels, step;
  float scale;
  int zero;
};

// Where a value of a row is between two others: the places of both, and how far it is from the first to the second, 0 to 1.
struct Between {
  int64_t first, second;
  float share;
};

// Two rows of an image of `channels`, what is between them, and how that is rounded. `columns` is the length of both.
struct RowPair {
  const uint8_t *first, *second;
  float share;
  int64_t columns, channels;
  float ratio;
  int zero, y_zero;
};

// Items with `classes` values each. From one value of an item to the next it is `step`; if that is 1, an item is a row, and else
// the items lie side by side.
struct Classes {
  int64_t classes, step, count;
};

using MakeConvolution = std::unique_ptr<ConvolutionKernel> (*)(Convolution);

// Makes a convolution. If its kernel is one pixel and it has fewer outputs than a vector has lanes, some neighbouring pixels may
// count as one.
std::unique_ptr<ConvolutionKernel> with_few_outputs(Convolution made, int64_t lanes, MakeConvolution make);

// Makes a depthwise convolution. If its kernel has one row, an image of one row, a sequence, counts as a column: kernels compute
// several rows of an image at a time.
std::unique_ptr<ConvolutionKernel> with_one_row(Convolution made, MakeConvolution make);

// Lines by element, with a bend: v = clip(below * min(x - bend, 0) + above * max(x - bend, 0) + level, least, most). They repeat
// after `period` elements. y = rint(v), or y is the curve of t = rint(v), as in a Convolution; then least and most are the bounds
// of int16. The vectors hold `kBehind` further numbers, of any value: whole vectors are read.
struct BentLines {
  static constexpr size_t kBehind = 64;
  static constexpr size_t kFlat = 63;  // in `kept`: `above` and `level` have 64 equal values
  std::vector<float> below, above, level;
  size_t period = 0, kept = SIZE_MAX;  // the bits of a place that count in `above` and `level`
  int bend = 0, least = 0, most = 255;
  std::vector<int16_t> curve;  // (2, kSegments) or empty
};

// The kernels that add no products of bytes.
struct VectorKernels {
  // x and y are rows as long as the scale.
  void (*normalize)(const Normalization& norm, const float* x, float* y, int64_t rows);
  // kept = r * before, where the reset gate comes first.
  void (*reset_state)(const GruStep& step, float* kept);
  void (*next_state)(const GruStep& step, float* after);
  void (*next_cell)(const LstmStep& step, float* after);
  // y = the product of rows x (rows, inputs) and a panel.
  void (*multiply_floats)(const FloatPanel& panel, const float* x, float* y, int64_t rows);
  // to[i] = table[from[i]]; `to` may be `from`.
  void (*lookup)(const uint8_t* from, uint8_t* to, size_t count, const uint8_t* table);
  // Computes y from `count` elements of a and `period` of b, which stand for each `period` elements of a.
  void (*combine)(const Pair& pair, const uint8_t* a, const uint8_t* b, size_t count, size_t period, uint8_t* y);
  // to[w, c] = the mean of channel c in window w; at most 2^23 pixels.
  void (*mean_windows)(const Windows& windows, size_t channels, const Mean& mean, uint8_t* to);
  // to[w, c] = the largest value of channel c in window w; at least one pixel.
  void (*max_windows)(const Windows& windows, size_t channels, uint8_t* to);
  // to[p, c] = clip(rint(from[c, p] / scale) + zero, 0, 255) for `count` pixels p; at most three channels.
  void (*quantize_pixels)(const float* from, int64_t count, const Planes& planes, uint8_t* to);
  // to[p, c] = clip(rint(ratio * (x - zero)) + y_zero), where x is between the values of channel c at four pixels: two columns
  // of both rows. There are `count` pixels p.
  void (*interpolate)(const RowPair& rows, const Between* columns, int64_t count, uint8_t* to);
  // y = the softmax of each item; it is exact to 1e-6. An item is NaN if a value is NaN or infinity, or if all are -infinity.
  void (*softmax)(const Classes& size, const float* x, float* y);
  // The same of scale * x.
  void (*softmax_of_bytes)(const Classes& size, const uint8_t* x, float scale, float* y);
  // Computes lines of some elements, from the first of a period on.
  void (*bend_lines)(const BentLines& lines, const uint8_t* from, uint8_t* to, size_t count);
  // moments[i] += the sum of from[r, i] over all rows r, and moments[stride + i] += that of their squares; for `length` places i
  // of rows that are `length` apart. At most 2^16 rows.
  void (*add_moments)(const uint8_t* from, size_t rows, size_t length, size_t stride, uint32_t* moments);
  // Computes a head with few queries.
  void (*attend_few)(const AttentionSize& size, const Head& head);
  // Rounds a row of a cache to integers from -127 to 127, writes them plus kCacheZero, and returns the step: the greatest
  // absolute value / 127, 0 if that is no normal number, and NaN for a row that is not finite.
  float (*round_row)(const float* x, int64_t count, uint8_t* to);
  // Caps the scores of a query, adds the masks, hides the keys that the query does not see, and returns the greatest score; NaN
  // if one of them is NaN or infinite, except -infinity beside others. Scores from `count` on become -infinity, until the last
  // vector of bytes is whole; behind all keys, the caller has done that until the last vector of floats is whole. Returns
  // -infinity if no key is left and the result is 0 then.
  float (*greatest_seen)(const AttentionSize& size, const Head& head, int64_t row, int64_t count, float* scores);
};

// The kernels of an instruction set. A set that only adds products of bytes (AVX-VNNI, AMX, i8mm) has the vector kernels of the
// set that it extends.
//
// Each Target is a constant (`constinit`). A constructor would run when the library is loaded, on every processor, in the
// instructions that its file is compiled to.
struct Target {
  const char* name;
  bool (*available)();
  std::unique_ptr<ConvolutionKernel> (*convolution)(Convolution);
  std::unique_ptr<MatrixKernel> (*matrix)(Matrix);
  std::unique_ptr<MatrixKernel> (*block_matrix)(const BlockMatrix&);
  // Computes a head with more queries; `vectors` are those below.
  void (*attend)(const VectorKernels& vectors, const AttentionSize& size, const Head& head);
  const VectorKernels& vectors;
};

// Returns all instruction sets that this library was compiled for, the fastest first.
const std::vector<const Target*>& targets();

// Returns the fastest instruction set of this CPU, or the one that REQUANT_KERNELS_ISA names; throws if it is not here.
const Target& chosen();

// Returns the chosen instruction set for what fits it, else the portable one.
template <class Function>
const Target& chosen_for(const Function& function) {
  return function.fits() ? chosen() : *targets().back();
}

}  // namespace requant
