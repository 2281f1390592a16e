// Convolution with several channels in a group, in vectors: rows of the image by panels of weights.
//
// The taps of one row of the kernel are neighbours in an NHWC image: a run of bytes. So the patch of a pixel is a run for
// each row of the kernel, and the patches of neighbouring pixels begin the same number of bytes apart. The product reads
// them where they are. Where a patch reaches over the border, the rows of the image around it are copied with a border.
//
// A panel holds the weights of up to `kPanelVectors` vectors of output channels. Its bytes stand in the order in which the
// product reads them: quads of the patch, vectors, channels, then the four of a quad. All sums of some pixels stay in
// registers. The file that includes this has included `add_products` of its instruction set.
#pragma once

#include <algorithm>
#include <cstring>

#include "border.h"
#include "finish.h"
#include "tables.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

class Dense final : public ConvolutionKernel {
 public:
  explicit Dense(Convolution made)
      : conv_(std::move(made)), finish_(conv_), depth_(conv_.inputs / conv_.group), width_(conv_.outputs / conv_.group) {
    const bool joined = conv_.group == 1 && conv_.dilation[1] == 1;
    across_ = joined ? 1 : conv_.kernel[1];
    run_ = conv_.taps() * depth_ / (conv_.kernel[0] * across_);
    quads_ = (run_ + 3) / 4;
    pack();
  }

  void run(const uint8_t* x, const uint8_t* residual, uint8_t* y, const Extent& extent,
           const Parallel& parallel) const override {
    const int64_t pixels = extent.batch * extent.rows * extent.columns;
    const Task whole{x, residual, y, conv_.pointwise() ? Extent{1, 1, pixels, 1, pixels} : extent, {}};
    const Grid grid = grid_of(whole.extent);
    parallel(static_cast<size_t>(whole.extent.batch * grid.bands * grid.blocks * grid.chunks), [&](size_t index) {
      Task task = whole;
      task.part = part_of(grid, whole.extent, static_cast<int64_t>(index));
      compute(task);
    });
  }

 private:
  // Some pixels and panels of the result.
  struct Part {
    int64_t image, row, rows, column, columns, panel, panels;
  };

  struct Task {
    const uint8_t *x, *residual;
    uint8_t* y;
    Extent extent;
    Part part;
  };

  // How the result is divided into parts: bands of rows, blocks of columns, chunks of panels; and the size of each.
  struct Grid {
    int64_t bands, rows, blocks, columns, chunks, panels;
  };

  // Where the patches of a part are: the first byte of the first one, and the bytes from one row or column of results to the
  // next. The runs of a patch are `line` bytes apart for each row of the image.
  struct Field {
    const uint8_t* corner;
    int64_t line, row, column;
  };

  static constexpr int64_t kWork = 1 << 21;   // products of one task, about
  static constexpr int64_t kBorder = 1 << 17; // bytes of a copy with a border, about: they stay in the second cache
  static constexpr int64_t kBlock = 1 << 16;  // bytes of the pixels of one task of a flat convolution, about
  static constexpr int64_t kSlack = 4;        // bytes that are read behind a run

  int64_t reach(int axis) const { return (conv_.kernel[axis] - 1) * conv_.dilation[axis] + 1; }

  // ---------------------------------------------------------------------------------------------------- weights

  void pack() {
    const int64_t vectors = divided(width_, kLanes), count = divided(vectors, kPanelVectors);
    const int64_t bytes = kBytes * quads_ * conv_.kernel[0] * across_;  // of a vector of channels
    starts_.reserve(conv_.group * vectors * kLanes);  // the panels point into these
    multipliers_.reserve(conv_.group * vectors * kLanes);
    weights_.assign(conv_.group * vectors * bytes, 0);
    uint8_t* to = weights_.data();
    for (int64_t group = 0; group < conv_.group; ++group)
      for (int64_t index = 0, first = 0; index < count; ++index) {  // the last panels are the widest
        const int64_t wide = (vectors - first) / (count - index);
        add_panel(group, first, static_cast<int>(wide), first + wide == vectors, to);
        first += wide;
        to += wide * bytes;
      }
    conv_.weights = {};
  }

  void add_panel(int64_t group, int64_t first, int vectors, bool last, uint8_t* to) {
    Panel panel;
    panel.channel = group * width_ + first * kLanes;
    panel.bytes = std::min<int64_t>(kLanes, width_);
    panel.last = (vectors - 1) * kLanes;
    if (last) panel.last = std::max<int64_t>(0, width_ - kLanes) - first * kLanes;
    panel.even = panel.last == (vectors - 1) * kLanes && panel.bytes == kLanes;
    panel.start = starts_.data() + starts_.size();
    panel.multiplier = multipliers_.data() + multipliers_.size();
    panel.weights = to;
    for (int vector = 0; vector < vectors; ++vector)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const bool there = lane < panel.bytes;
        const int64_t o = panel.channel + panel.offset(vector, vectors) + lane;
        const int32_t sum = there ? pack_channel(o, to + vector * kBytes + 4 * lane, vectors * kBytes, panel) : 0;
        starts_.push_back(there ? conv_.bias[o] - (conv_.x_zero - kOffset) * sum : 0);
        multipliers_.push_back(there ? conv_.multiplier[o] : 0.0f);
      }
    panels_.push_back(panel);
    widths_.push_back(vectors);
  }

  // Writes the weights of a channel, quads `step` bytes apart, and returns their sum.
  int32_t pack_channel(int64_t o, uint8_t* to, int64_t step, Panel& panel) const {
    int32_t sum = 0;
    const int64_t taps = run_ / depth_;  // of a run
    for (int64_t first = 0; first < conv_.taps(); first += taps)
      for (int64_t quad = 0; quad < quads_; ++quad, to += step) {
        int8_t four[4] = {};
        for (int64_t i = 0; i < std::min<int64_t>(4, run_ - 4 * quad); ++i) {
          const int64_t tap = first + (4 * quad + i) / depth_, channel = (4 * quad + i) % depth_;
          sum += four[i] = conv_.weights[(o * depth_ + channel) * conv_.taps() + tap];
        }
        std::memcpy(to, four, 4);
        panel.narrow = panel.narrow && fits_narrow(four);
      }
    return sum;
  }

  // ------------------------------------------------------------------------------------------------------ parts

  Grid grid_of(const Extent& extent) const {
    const int64_t all = static_cast<int64_t>(panels_.size()), row = extent.columns * conv_.outputs * conv_.taps() * depth_;
    Grid grid{1, extent.rows, 1, extent.columns, 1, all};
    if (conv_.pointwise()) {
      const int64_t most = std::clamp<int64_t>(std::min(kBlock / depth_, kWork / (conv_.outputs * depth_)), 24, 96);
      grid.blocks = divided(extent.columns, most);
      grid.columns = divided(extent.columns, grid.blocks);
      grid.blocks = divided(extent.columns, grid.columns);
    } else {
      const int64_t held = kBorder / ((extent.width + reach(1)) * conv_.inputs) - reach(0);  // rows of the image
      const int64_t most = std::clamp<int64_t>(held / conv_.stride[0], 1, std::max<int64_t>(4, kWork / row));
      grid.bands = divided(extent.rows, most);
      grid.rows = divided(extent.rows, grid.bands);
      grid.bands = divided(extent.rows, grid.rows);
    }
    const int64_t work = row / extent.columns * grid.columns * grid.rows;
    if (conv_.table.empty())  // all panels may write the same channels before one looks them up
      grid.panels = divided(all, std::clamp<int64_t>(work / kWork, 1, all));
    grid.chunks = divided(all, grid.panels);
    return grid;
  }

  Part part_of(const Grid& grid, const Extent& extent, int64_t index) const {
    Part part{};
    part.panel = index % grid.chunks * grid.panels;
    part.panels = std::min(grid.panels, static_cast<int64_t>(panels_.size()) - part.panel);
    index /= grid.chunks;
    part.column = index % grid.blocks * grid.columns;
    part.columns = std::min(grid.columns, extent.columns - part.column);
    index /= grid.blocks;
    part.row = index % grid.bands * grid.rows;
    part.rows = std::min(grid.rows, extent.rows - part.row);
    part.image = index / grid.bands;
    return part;
  }

  // Returns where the patches of a part are; copies them if one reaches over a border, or the last run over the end.
  Field field_of(const Task& task) const {
    const Extent& extent = task.extent;
    const Part& part = task.part;
    const int64_t pixel = conv_.inputs;
    const Region region = seen(conv_, part.row, part.rows, part.column, part.columns);
    const auto [top, left, rows, columns] = region;
    const uint8_t* image = task.x + part.image * extent.height * extent.width * pixel;
    const bool inside = top >= 0 && left >= 0 && top + rows <= extent.height && left + columns <= extent.width;
    const int64_t behind = ((top + rows - 1) * extent.width + left + columns) * pixel + 4 * quads_ - run_;
    if (inside && behind <= (extent.batch - part.image) * extent.height * extent.width * pixel)
      return field(image + (top * extent.width + left) * pixel, extent.width * pixel);
    return field(bordered(image, extent, pixel, region, conv_.x_zero, kSlack), columns * pixel);
  }

  Field field(const uint8_t* corner, int64_t line) const {
    return {corner, line, line * conv_.stride[0], conv_.inputs * conv_.stride[1]};
  }

  // --------------------------------------------------------------------------------------------------- products

  void compute(const Task& task) const {
    const Field field = field_of(task);
    const Part& part = task.part;
    for (int64_t index = part.panel; index < part.panel + part.panels; ++index)
      multiply_panel<kPanelVectors>(task, field, panels_[index], widths_[index]);
    for (int64_t row = 0; row < part.rows; ++row)
      look_up_all(conv_, task.y + place_of(task, row) * conv_.outputs, part.columns, 0, conv_.outputs);
  }

  // Returns the number of the first pixel of a row of a part, in the whole result.
  static int64_t place_of(const Task& task, int64_t row) {
    return (task.part.image * task.extent.rows + task.part.row + row) * task.extent.columns + task.part.column;
  }

  // Calls `multiply_rows` with the number of vectors as a constant, so that the sums stay in registers.
  template <int Vectors>
  void multiply_panel(const Task& task, const Field& field, const Panel& panel, int vectors) const {
    if constexpr (Vectors > 1)
      if (vectors < Vectors) return multiply_panel<Vectors - 1>(task, field, panel, vectors);
    constexpr int kRows = panel_rows(Vectors);
    const Part& part = task.part;
    const int64_t steps = divided(part.columns, kRows), few = part.columns / steps, more = part.columns % steps;
    const uint8_t* corner = field.corner + panel.channel / width_ * depth_;
    for (int64_t row = 0; row < part.rows; ++row) {
      const int64_t line = place_of(task, row);
      for (int64_t step = 0, column = 0; step < steps; ++step) {  // steps of equal length, or one more
        const int64_t rows = few + (step < more), at = (line + column) * conv_.outputs + panel.channel;
        const Place place{task.y + at, task.residual ? task.residual + at : nullptr};
        multiply_rows<kRows, Vectors>(rows, corner + row * field.row + column * field.column, field, panel, place);
        column += rows;
      }
    }
  }

  // Calls `product` with the number of rows as a constant.
  template <int Rows, int Vectors>
  void multiply_rows(int64_t rows, const uint8_t* x, const Field& field, const Panel& panel, const Place& place) const {
    if constexpr (Rows > 1)
      if (rows < Rows) return multiply_rows<Rows - 1, Vectors>(rows, x, field, panel, place);
    if constexpr (kHasNarrow)
      if (panel.narrow) return product<true, Rows, Vectors>(x, field, panel, place);
    product<false, Rows, Vectors>(x, field, panel, place);
  }

  // Multiplies the patches of some neighbouring pixels by a panel.
  template <bool Narrow, int Rows, int Vectors>
  void product(const uint8_t* x, const Field& field, const Panel& panel, const Place& place) const {
    Ints sum[Rows][Vectors];
#pragma unroll
    for (int row = 0; row < Rows; ++row)
#pragma unroll
      for (int vector = 0; vector < Vectors; ++vector) sum[row][vector] = load_ints(panel.start + vector * kLanes);
    const uint8_t* w = panel.weights;
    for (int64_t ky = 0; ky < conv_.kernel[0]; ++ky, x += conv_.dilation[0] * field.line)
      for (int64_t kx = 0; kx < across_; ++kx)
        add_products<Narrow>(sum, x + kx * conv_.dilation[1] * conv_.inputs, field.column, w, quads_);
    finish_.write(sum, panel, place);
  }

  Convolution conv_;
  Finish finish_;
  int64_t depth_, width_;     // input and output channels of a group
  int64_t across_ = 1;        // runs of a row of the kernel
  int64_t run_ = 0, quads_ = 0;  // bytes and quads of a run
  Aligned<uint8_t> weights_;
  Aligned<int32_t> starts_;  // the bias without the parts of x_zero and kOffset
  Aligned<float> multipliers_;
  std::vector<Panel> panels_;
  std::vector<int> widths_;  // of the panels, in vectors
};

}  // namespace requant::REQUANT_TARGET
