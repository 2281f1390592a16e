// Convolutions that count as others. Where a kernel of one pixel has few output channels, some neighbouring pixels count as one,
// so that their results fill a vector. An image of one row counts as a column.
#include <algorithm>

#include "target.h"

namespace requant {
namespace {

template <class T>
std::vector<T> repeated(const std::vector<T>& values, int64_t count) {
  std::vector<T> made;
  for (int64_t i = 0; i < count; ++i) made.insert(made.end(), values.begin(), values.end());
  return made;
}

// Returns a convolution of one pixel as one of some neighbouring pixels: an output has weights for its own pixel, and 0 for the
// others.
Convolution joined(const Convolution& one, int64_t count) {
  Convolution made = one;
  made.inputs *= count;
  made.outputs *= count;
  made.weights.assign(made.inputs * made.outputs, 0);
  for (int64_t output = 0; output < made.outputs; ++output)
    std::copy_n(&one.weights[output % one.outputs * one.inputs], one.inputs,
                &made.weights[output * made.inputs + output / one.outputs * one.inputs]);
  made.bias = repeated(one.bias, count);
  made.multiplier = repeated(one.multiplier, count);
  if (one.table.size() > 256) made.table = repeated(one.table, count);
  return made;
}

class Together final : public ConvolutionKernel {
 public:
  Together(Convolution made, int64_t count, MakeConvolution make)
      : count_(count), some_(make(joined(made, count))), one_(make(std::move(made))) {}

  void run(const uint8_t* x, const uint8_t* residual, uint8_t* y, const Extent& extent,
           const Parallel& parallel) const override {
    const int64_t pixels = extent.batch * extent.rows * extent.columns, all = pixels / count_;
    if (pixels % count_ != 0 || extent.down) return one_->run(x, residual, y, extent, parallel);
    some_->run(x, residual, y, {1, 1, all, 1, all}, parallel);
  }

 private:
  int64_t count_;
  std::unique_ptr<ConvolutionKernel> some_, one_;
};

// Returns a convolution whose images are turned: rows are columns. A kernel of one row stays as it is in memory.
Convolution turned(Convolution made) {
  for (int64_t (*each)[2] : {&made.kernel, &made.stride, &made.dilation, &made.before, &made.after})
    std::swap((*each)[0], (*each)[1]);
  return made;
}

class OneRow final : public ConvolutionKernel {
 public:
  OneRow(Convolution made, MakeConvolution make) : column_(make(turned(made))), any_(make(std::move(made))) {}

  void run(const uint8_t* x, const uint8_t* residual, uint8_t* y, const Extent& extent,
           const Parallel& parallel) const override {
    if (extent.height != 1 || extent.rows != 1) return any_->run(x, residual, y, extent, parallel);
    column_->run(x, residual, y, {extent.batch, extent.width, 1, extent.columns, 1}, parallel);
  }

 private:
  std::unique_ptr<ConvolutionKernel> column_, any_;
};

}  // namespace

std::unique_ptr<ConvolutionKernel> with_one_row(Convolution made, MakeConvolution make) {
  if (made.kernel[0] != 1 || made.kernel[1] == 1) return make(std::move(made));
  return std::make_unique<OneRow>(std::move(made), make);
}

std::unique_ptr<ConvolutionKernel> with_few_outputs(Convolution made, int64_t lanes, MakeConvolution make) {
  const bool few = made.pointwise() && made.group == 1 && made.outputs < lanes && lanes % made.outputs == 0;
  if (!few) return make(std::move(made));
  const int64_t count = lanes / made.outputs;
  return std::make_unique<Together>(std::move(made), count, make);
}

}  // namespace requant
