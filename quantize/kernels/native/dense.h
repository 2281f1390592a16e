// Convolution with several channels in a group: rows of the image by panels of weights.
//
// The taps of one row of the kernel are neighbours in an NHWC image: a run of bytes. So the patch of a pixel is a run for
// each row of the kernel, and the patches of neighbouring pixels begin the same number of bytes apart. The product reads
// them where they are. Where a patch reaches over the border, the rows of the image around it are copied with a border.
//
// A panel holds the weights of a few vectors of output channels. Its bytes stand in the order in which the product reads
// them: quads of the patch, vectors, channels, then the four of a quad.
#pragma once

#include <algorithm>
#include <cstring>

#include "block.h"
#include "border.h"
#include "finish.h"
#include "tables.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// `Product` multiplies patches by panels, in vectors or in tiles.
template <class Product>
class Dense final : public ConvolutionKernel {
 public:
  explicit Dense(Convolution made)
      : conv_(std::move(made)),
        finish_(conv_),
        depth_(conv_.inputs / conv_.group),
        width_(conv_.outputs / conv_.group),
        run_(conv_.run_bytes()),
        quads_(Product::quads(run_)) {
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

  // Where the patches of a part are: the first byte of the first one, the bytes from one row of the image to the next, and from
  // one patch to the next.
  struct Field {
    const uint8_t* corner;
    int64_t line;
    Step patches;
  };

  static constexpr int64_t kWork = Product::kWork;
  static constexpr int64_t kBorder = 1 << 17; // bytes of a copy with a border, about: they stay in the second cache

  int64_t reach(int axis) const { return (conv_.kernel[axis] - 1) * conv_.dilation[axis] + 1; }

  // ---------------------------------------------------------------------------------------------------- weights

  void pack() {
    const int64_t vectors = divided(width_, kLanes);
    const int64_t bytes = kBytes * quads_ * conv_.runs();  // of a vector of channels
    starts_.reserve(conv_.group * vectors * kLanes);  // the panels point into these
    multipliers_.reserve(conv_.group * vectors * kLanes);
    weights_.assign(conv_.group * vectors * bytes, 0);
    uint8_t* to = weights_.data();
    for (int64_t group = 0; group < conv_.group; ++group)
      for (int64_t first = 0; first < vectors;) {
        const int64_t wide = Product::vectors(vectors - first, bytes / kLanes);
        add_panel(group, first, static_cast<int>(wide), first + wide == vectors, to);
        first += wide;
        to += wide * bytes;
      }
    conv_.weights = {};
  }

  void add_panel(int64_t group, int64_t first, int vectors, bool last, uint8_t* to) {
    Panel panel;
    panel.channel = group * width_ + first * kLanes;
    panel.input = group * depth_;
    panel.bytes = std::min<int64_t>(kLanes, width_);
    panel.last = (vectors - 1) * kLanes;
    if (last) panel.last = std::max<int64_t>(0, width_ - kLanes) - first * kLanes;
    panel.even = panel.last == (vectors - 1) * kLanes && panel.bytes == kLanes;
    panel.start = starts_.data() + starts_.size();
    panel.multiplier = multipliers_.data() + multipliers_.size();
    panel.weights = to;
    panel.vectors = vectors;
    for (int vector = 0; vector < vectors; ++vector)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const bool there = lane < panel.bytes;
        const int64_t o = panel.channel + panel.offset(vector, vectors) + lane;
        const int32_t sum = there ? pack_channel(o, to + vector * kBytes + 4 * lane, vectors * kBytes, panel) : 0;
        starts_.push_back(there ? conv_.bias[o] - (conv_.x_zero - kOffset) * sum : 0);
        multipliers_.push_back(there ? conv_.multiplier[o] : 0.0f);
      }
    panels_.push_back(panel);
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
      grid.blocks = divided(extent.columns, Product::pixels(depth_, conv_.outputs));
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
    if (inside && Product::kThin && conv_.taps() == 1 && conv_.stride[1] > 1)
      return {thinned(image, extent, part), 0, {part.columns * pixel, pixel}};
    if (inside && behind <= (extent.batch - part.image) * extent.height * extent.width * pixel)
      return field(image + (top * extent.width + left) * pixel, extent.width * pixel);
    return field(bordered(image, extent, pixel, region, conv_.x_zero, 4 * quads_ - run_), columns * pixel);
  }

  Field field(const uint8_t* corner, int64_t line) const {
    return {corner, line, {line * conv_.stride[0], conv_.inputs * conv_.stride[1]}};
  }

  // Copies the pixels that a kernel of one pixel reads; it leaves out others.
  const uint8_t* thinned(const uint8_t* image, const Extent& extent, const Part& part) const {
    thread_local Scratch scratch;
    const int64_t pixel = conv_.inputs;
    uint8_t* const copy = scratch.bytes(part.rows * part.columns * pixel + 4 * quads_ - run_);
    uint8_t* to = copy;
    for (int64_t row = 0; row < part.rows; ++row)
      for (int64_t column = 0; column < part.columns; ++column, to += pixel) {
        const int64_t y = (part.row + row) * conv_.stride[0] - conv_.before[0];
        const int64_t x = (part.column + column) * conv_.stride[1] - conv_.before[1];
        copy_bytes(to, image + (y * extent.width + x) * pixel, pixel);
      }
    return copy;
  }

  // --------------------------------------------------------------------------------------------------- products

  void compute(const Task& task) const {
    const Part& part = task.part;
    const Block block = block_of(task);
    Product product(finish_, block);
    product.multiply(&panels_[part.panel], part.panels);
    for (int64_t row = 0; row < part.rows; ++row)
      look_up_all(conv_, block.place.to + row * block.results.down, part.columns, 0, conv_.outputs);
  }

  Block block_of(const Task& task) const {
    const auto& [x, residual, y, extent, part] = task;
    const Field field = field_of(task);
    const int64_t first = (part.image * extent.rows + part.row) * extent.columns + part.column, at = first * conv_.outputs;
    return {.rows = part.rows,
            .columns = part.columns,
            .patch = field.corner,
            .patches = field.patches,
            .runs = {field.line * conv_.dilation[0], conv_.inputs * conv_.dilation[1]},
            .count = {conv_.kernel[0], conv_.runs_across()},
            .quads = quads_,
            .place = {y + at, residual ? residual + at : nullptr},
            .results = {extent.columns * conv_.outputs, conv_.outputs}};
  }

  Convolution conv_;
  Finish finish_;
  int64_t depth_, width_;     // input and output channels of a group
  int64_t run_, quads_;       // bytes and quads of a run
  Aligned<uint8_t> weights_;
  Aligned<int32_t> starts_;  // the bias without the parts of x_zero and kOffset
  Aligned<float> multipliers_;
  std::vector<Panel> panels_;
};

}  // namespace requant::REQUANT_TARGET
