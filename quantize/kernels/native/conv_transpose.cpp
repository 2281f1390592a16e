// ConvTranspose: a transposed convolution of uint8 NHWC tensors.
//
// Inputs: x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B, table; those of a Convolution. w is
// (inputs, outputs, height, width) as in ONNX, with zero points 0, and its scales are those of the outputs. The result must have
// as many pixels as the stride for each pixel of a smaller image, by axis, and pads are smaller than the kernel.
//
// Pixels of the result with the same remainder by the stride, a phase, are a convolution of x with every stride-th tap of w. The
// phases of a row lie side by side, so that they are the outputs of one convolution: it reads what any of them reads, with
// weights 0 for the others. Each phase of rows has a convolution, which writes every stride-th row.
#include <algorithm>

#include "aligned.h"
#include "operators.h"
#include "requantization.h"
#include "target.h"
#include "window.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.ConvTranspose"};

constexpr int64_t kLongest = 256;  // stride

class ConvTransposeOperator {
 public:
  explicit ConvTransposeOperator(const ort::Node& node) {
    const Constants constants{require, node};
    read_window(node, window_);
    read_weights(constants);
    require(node.attribute("group", 1) == 1, "group must be 1");
    constants.read_sums(positive(constants.scalar<float>(kYScale)), whole_);
    constants.read_table(whole_);
    const std::vector<int64_t> longer = node.attributes("output_padding", {0, 0});
    require(longer.size() == 2, "output_padding must have two values");
    for (int axis = 0; axis < 2; ++axis) {
      const int64_t stride = window_.stride[axis];
      require(stride <= kLongest && window_.dilation[axis] == 1, "strides must be at most 256, and dilations 1");
      const int64_t pad = std::max(window_.before[axis], window_.after[axis]);
      require(pad < window_.kernel[axis], "pads must be smaller than the kernel");
      require(longer[axis] >= 0 && longer[axis] <= kFarthest, "output_padding must be from 0 to 32768");
      const int64_t more = window_.kernel[axis] - stride - window_.before[axis] - window_.after[axis] + longer[axis];
      require(more % stride == 0, "the result must have whole strides");
      grown_[axis] = more / stride;
    }
    for (int64_t phase = 0; phase < window_.stride[0]; ++phase) {
      Convolution made = convolution_of(phase);
      const Target& target = chosen_for(made);
      phases_.push_back(target.convolution(std::move(made)));
    }
    free_memory(whole_.weights);  // the kernels hold them packed
  }

  void run(const ort::Run& run) const {
    const ort::Tensor x = run.input(kX);
    require(x.shape.size() == 4 && x.shape[3] == whole_.inputs, "x must be (batch, height, width, input channels of w)");
    const int64_t rows = x.shape[1] + grown_[0], columns = x.shape[2] + grown_[1], width = columns * window_.stride[1];
    require(x.shape[1] > 0 && x.shape[2] > 0 && rows > 0 && columns > 0, "x has no pixels, or too few for the padding");
    uint8_t* const y = run.output({x.shape[0], rows * window_.stride[0], width, whole_.outputs});
    if (x.shape[0] == 0) return;
    const int64_t line = width * whole_.outputs;
    const Extent extent{x.shape[0], x.shape[1], x.shape[2], rows, columns, window_.stride[0] * line};
    for (size_t phase = 0; phase < phases_.size(); ++phase)
      phases_[phase]->run(x.as<uint8_t>(), nullptr, y + static_cast<int64_t>(phase) * line, extent,
                          [&](size_t count, const Work& work) { run.parallel(count, work); });
  }

 private:
  // Which pixels of x some neighbouring phases read along an axis, relative to that of the result divided by the stride.
  struct Seen {
    int64_t first, last;
    int64_t count() const { return last - first + 1; }
  };

  void read_weights(const Constants& constants) {
    const ort::Tensor w = constants.tensor(kW), w_zero = constants.tensor(kWZero);
    require(w.shape.size() == 4 && w.size() > 0, "w must have four axes, and must not be empty");
    require(w.size() / w.shape[1] <= kDeepest, "an output has too many products");
    require(std::all_of(w_zero.as<int8_t>(), w_zero.as<int8_t>() + w_zero.size(), [](int8_t zero) { return zero == 0; }),
            "w_zero_point must be 0");
    whole_.inputs = w.shape[0];
    whole_.outputs = w.shape[1];
    std::copy_n(&w.shape[2], 2, window_.kernel);
    whole_.weights.assign(w.as<int8_t>(), w.as<int8_t>() + w.size());
  }

  // Returns the tap with which a phase reads a pixel; it may be outside of the kernel.
  int64_t tap(int axis, int64_t phase, int64_t pixel) const {
    return phase + window_.before[axis] - window_.stride[axis] * pixel;
  }

  Seen seen(int axis, int64_t first, int64_t count) const {
    Seen all{0, 0};  // the pixel at the same place too, so that the image is padded and not cut
    for (int64_t phase = first; phase < first + count; ++phase) {
      const int64_t last = (phase + window_.before[axis]) / window_.stride[axis];
      all.last = std::max(all.last, last);
      for (int64_t pixel = last; tap(axis, phase, pixel) < window_.kernel[axis]; --pixel) all.first = std::min(all.first, pixel);
    }
    return all;
  }

  // Returns the convolution for a phase of rows. Its outputs are those of each phase of columns, one after the other.
  Convolution convolution_of(int64_t phase) const {
    const int64_t stride = window_.stride[1];
    const Seen seen_by[] = {seen(0, phase, 1), seen(1, 0, stride)};
    Convolution made;
    made.inputs = whole_.inputs;
    made.outputs = stride * whole_.outputs;
    made.x_zero = whole_.x_zero;
    made.y_zero = whole_.y_zero;
    for (int axis = 0; axis < 2; ++axis) {
      made.kernel[axis] = seen_by[axis].count();
      made.before[axis] = -seen_by[axis].first;
      made.after[axis] = grown_[axis] + seen_by[axis].last;  // below 0 where the padding cuts off more than it adds
    }
    for (int64_t column = 0; column < stride; ++column) {
      made.bias.insert(made.bias.end(), whole_.bias.begin(), whole_.bias.end());
      made.multiplier.insert(made.multiplier.end(), whole_.multiplier.begin(), whole_.multiplier.end());
      if (whole_.table.size() > 256) made.table.insert(made.table.end(), whole_.table.begin(), whole_.table.end());
      append_weights(phase, column, seen_by, made);
    }
    if (whole_.table.size() == 256) made.table = whole_.table;
    return made;
  }

  // Appends the weights of one phase of rows and of columns: (outputs, inputs, rows, columns).
  void append_weights(int64_t row, int64_t column, const Seen (&seen_by)[2], Convolution& made) const {
    const int64_t height = window_.kernel[0], width = window_.kernel[1];
    for (int64_t i = 0; i < whole_.outputs * whole_.inputs; ++i) {
      const int64_t output = i / whole_.inputs, input = i % whole_.inputs;
      const int8_t* const taps = &whole_.weights[(input * whole_.outputs + output) * height * width];
      for (int64_t y = seen_by[0].first; y <= seen_by[0].last; ++y)
        for (int64_t x = seen_by[1].first; x <= seen_by[1].last; ++x) {
          const int64_t down = tap(0, row, y), across = tap(1, column, x);
          const bool inside = std::min(down, across) >= 0 && down < height && across < width;
          made.weights.push_back(inside ? taps[down * width + across] : int8_t{0});
        }
    }
  }

  Window window_;
  Convolution whole_;     // channels, weights as in ONNX, and how sums become uint8
  int64_t grown_[2] = {};  // how many pixels more than x the smaller image has
  std::vector<std::unique_ptr<ConvolutionKernel>> phases_;
};

}  // namespace

std::vector<ort::CustomOp*> conv_transpose_operators() {
  using enum ort::ElementType;
  return named<ConvTransposeOperator>(
      "ConvTranspose", {kUint8, kFloat, kUint8, kInt8, kFloat, kInt8, kFloat, kUint8, kInt32, kUint8}, 8);
}

}  // namespace requant
