// Convolution: QLinearConv on NHWC tensors, with a residual and a table.
//
// Inputs: x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B, table, residual, residual_scale,
// residual_zero_point, curve, grid. All but x and the residual, which is added before the sum is rounded, are constants.
// w is (outputs, inputs / group, height, width) as in ONNX, with zero points 0. The table is (256,); or (outputs, 256), a row
// for each channel. The curve is (2, 64), lines in segments of the real value v, and grid (2,) is where the first one begins
// and how wide each is. Then y_scale and y_zero_point are those of the lines, and the inputs of these names are not read.
#include <algorithm>

#include "aligned.h"
#include "operators.h"
#include "requantization.h"
#include "rounded.h"
#include "target.h"
#include "window.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.Convolution"};

void read_weights(const Constants& from, Convolution& made) {
  const ort::Tensor w = from.tensor(kW), w_zero = from.tensor(kWZero);
  require(w.shape.size() == 4, "w must have four axes");
  require(w.size() > 0, "w must not be empty");
  made.group = from.node.attribute("group", 1);
  made.outputs = w.shape[0];
  require(made.group >= 1 && made.outputs % made.group == 0, "group must divide the output channels");
  made.inputs = w.shape[1] * made.group;
  made.kernel[0] = w.shape[2];
  made.kernel[1] = w.shape[3];
  require(w_zero.size() == 1 || w_zero.size() == made.outputs, "w_zero_point must have one value, or one for each output");
  made.weights.reserve(w.size());
  const int64_t depth = w.size() / made.outputs;
  require(depth <= kDeepest, "an output has too many products");
  for (int64_t i = 0; i < w.size(); ++i) {
    const int weight = w.as<int8_t>()[i] - w_zero.as<int8_t>()[w_zero.size() == 1 ? 0 : i / depth];
    require(weight >= INT8_MIN && weight <= INT8_MAX, "w without its zero points must be int8");
    made.weights.push_back(static_cast<int8_t>(weight));
  }
}

void read_residual(const Constants& from, float unit, Convolution& made) {
  if (!from.node.constant(kResidualScale)) return;
  require(!made.depthwise(), "a depthwise convolution has no residual");
  made.residual_zero = from.scalar<uint8_t>(kResidualZero);
  made.residual_ratio = positive(from.scalar<float>(kResidualScale) / unit);
}

class ConvolutionOperator {
 public:
  explicit ConvolutionOperator(const ort::Node& node) {
    const Constants constants{require, node};
    read_weights(constants, made_);
    read_window(node, made_);
    const Rounded rounded = Rounded::of(require, node, kYScale, kCurve, node.type(kCurve) != ort::kAny);
    made_.curve = rounded.curve;
    made_.offset = rounded.offset;
    const float unit = rounded.unit;
    constants.read_sums(unit, made_);
    read_residual(constants, unit, made_);
    constants.read_table(made_);
    has_residual_ = static_cast<bool>(node.constant(kResidualScale));
    kernel_ = chosen_for(made_).convolution(made_);
    free_memory(made_.weights);  // the kernel holds them packed
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(kX);
    require(x.shape.size() == 4 && x.shape[3] == made_.inputs, "x must be (batch, height, width, input channels of w)");
    const Extent extent{x.shape[0], x.shape[1], x.shape[2], made_.length(0, x.shape[1]), made_.length(1, x.shape[2])};
    require(extent.rows > 0 && extent.columns > 0, "the padded input is smaller than the kernel");
    const std::vector<int64_t> shape{extent.batch, extent.rows, extent.columns, made_.outputs};
    const ort::Tensor residual = has_residual_ ? run.input(kResidual) : ort::Tensor{};
    require(!has_residual_ || residual.shape == shape, "the residual must have the shape of the result");
    uint8_t* y = run.output(shape);
    if (extent.batch == 0) return;
    kernel_->run(x.as<uint8_t>(), residual.as<uint8_t>(), y, extent, [&](size_t count, const Work& work) {
      run.parallel(count, work);
    });
  }

 private:
  Convolution made_;
  bool has_residual_ = false;
  std::unique_ptr<ConvolutionKernel> kernel_;
};

}  // namespace

// Results may take the place of the residual: no part of it is read after its place was written. This saves the time in which a
// large result would be fetched from memory to be overwritten.
std::vector<ort::CustomOp*> convolution_operators() {
  using enum ort::ElementType;
  std::vector<ort::CustomOp*> made = named<ConvolutionOperator>(
      "Convolution",
      {kUint8, kFloat, kUint8, kInt8, kFloat, kInt8, kFloat, kUint8, kInt32, kUint8, kUint8, kFloat, kUint8, kInt16,
       kFloat},
      8);
  for (ort::CustomOp* each : made) {
    each->in_place = [](int** inputs, int** outputs) {
      static int residual = kResidual, result = 0;
      *inputs = &residual;
      *outputs = &result;
      return size_t{1};
    };
    each->release_in_place = [](int*, int*) {};
  }
  return made;
}

}  // namespace requant
