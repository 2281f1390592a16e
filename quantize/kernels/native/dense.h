// Convolution with several channels in a group: rows of the image by panels of weights.
//
// The taps of one row of the kernel are neighbours in an NHWC image: a run of bytes. So the patch of a pixel is a run for
// each row of the kernel, and the patches of neighbouring pixels begin the same number of bytes apart. The product reads
// them where they are. Where a patch reaches over the border, the rows of the image around it are copied with a border.
#pragma once

#include <algorithm>
#include <cstring>

#include "block.h"
#include "border.h"
#include "finish.h"
#include "packed.h"
#include "tables.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// `Way` is how patches are multiplied by panels: in vectors or in tiles.
template <class Way>
class Dense final : public ConvolutionKernel {
 public:
  explicit Dense(Convolution made)
      : conv_(std::move(made)), finish_(conv_), depth_(conv_.inputs / conv_.group), packed_(conv_) {
    free_memory(conv_.weights);
  }

  void run(const uint8_t* x, const uint8_t* residual, uint8_t* y, const Extent& extent,
           const Parallel& parallel) const override {
    const int64_t pixels = extent.batch * extent.rows * extent.columns;
    const bool flat = conv_.pointwise() && extent.down == 0;  // one row of all pixels
    const Task whole{x, residual, y, flat ? Extent{1, 1, pixels, 1, pixels} : extent, {}};
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

  static constexpr int64_t kBorder = 1 << 17;    // bytes of a copy of the image, about: they stay in the second cache
  static constexpr int64_t kNear = 1 << 19;      // bytes of weights that stay there too, at most
  static constexpr int64_t kLarge = 1 << 21;     // bytes of a residual that does not stay there
  static constexpr int64_t kCold = 1 << 16;      // bytes of weights that are worth fetching before the first use
  static constexpr int64_t kFarBlock = 1 << 19;  // bytes of pixels and results of a task that share weights from afar

  int64_t reach(int axis) const { return (conv_.kernel[axis] - 1) * conv_.dilation[axis] + 1; }

  // ------------------------------------------------------------------------------------------------------ parts

  Grid grid_of(const Extent& extent) const {
    const int64_t all = static_cast<int64_t>(packed_.panels().size());
    const int64_t pixel = conv_.outputs * conv_.taps() * depth_;  // products
    const int64_t of_task = Way::work(extent.batch * extent.rows * extent.columns * pixel);
    Grid grid{1, extent.rows, 1, extent.columns, 1, all};
    if (conv_.pointwise() && extent.down == 0) {
      grid.blocks = divided(extent.columns, pixels_of_block(of_task));
      grid.columns = divided(extent.columns, grid.blocks);
      grid.blocks = divided(extent.columns, grid.columns);
    } else {
      const int64_t worth = std::max<int64_t>(4, of_task / (pixel * extent.columns));
      grid.bands = divided(extent.rows, far() ? rows_held(extent) : std::min(rows_held(extent), worth));
      grid.rows = divided(extent.rows, grid.bands);
      grid.bands = divided(extent.rows, grid.rows);
    }
    const int64_t work = pixel * grid.columns * grid.rows;
    if (conv_.table.empty())  // all panels may write the same channels before one looks them up
      grid.panels = divided(all, std::clamp<int64_t>(work / of_task, 1, all));
    grid.chunks = divided(all, grid.panels);
    return grid;
  }

  // Whether weights come from the third cache or from memory. Then as many pixels as possible share them; tasks differ in panels.
  bool far() const { return packed_.bytes() > kNear && conv_.table.empty(); }

  int64_t pixels_of_block(int64_t of_task) const {
    const int64_t pixel = depth_ + conv_.outputs;  // bytes of a pixel and of its results
    return far() ? std::max<int64_t>(kFarBlock / pixel, 32) : Way::pixels(depth_, conv_.outputs, of_task);
  }

  // Returns the rows of the result whose patches stay in the second cache, if they have to be copied.
  int64_t rows_held(const Extent& extent) const {
    const int64_t line = conv_.taps() == 1 ? extent.columns : extent.width + reach(1);  // pixels of a row of the copy
    const int64_t held = kBorder / (line * conv_.inputs);
    return std::max<int64_t>(conv_.taps() == 1 ? held : (held - reach(0)) / conv_.stride[0], 1);
  }

  Part part_of(const Grid& grid, const Extent& extent, int64_t index) const {
    Part part{};
    part.panel = index % grid.chunks * grid.panels;
    part.panels = std::min(grid.panels, static_cast<int64_t>(packed_.panels().size()) - part.panel);
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
    const int64_t behind = ((top + rows - 1) * extent.width + left + columns) * pixel + packed_.padding();
    if (inside && Way::kThin && conv_.taps() == 1 && conv_.stride[1] > 1)
      return {thinned(image, extent, part), 0, {part.columns * pixel, pixel}};
    if (inside && behind <= (extent.batch - part.image) * extent.height * extent.width * pixel)
      return field(image + (top * extent.width + left) * pixel, extent.width * pixel);
    return field(bordered(image, extent, pixel, region, conv_.x_zero, packed_.padding()), columns * pixel);
  }

  Field field(const uint8_t* corner, int64_t line) const {
    return {corner, line, {line * conv_.stride[0], conv_.inputs * conv_.stride[1]}};
  }

  // Copies the pixels that a kernel of one pixel reads; it leaves out others.
  const uint8_t* thinned(const uint8_t* image, const Extent& extent, const Part& part) const {
    thread_local Scratch scratch;
    const int64_t pixel = conv_.inputs;
    uint8_t* const copy = scratch.bytes(part.rows * part.columns * pixel + packed_.padding());
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
    typename Way::Product product(finish_, block);
    product.multiply(&packed_.panels()[part.panel], part.panels);
    for (int64_t row = 0; row < part.rows; ++row)
      look_up_all(conv_, block.place.to + row * block.results.down, part.columns, 0, conv_.outputs);
  }

  Block block_of(const Task& task) const {
    const auto& [x, residual, y, extent, part] = task;
    const Field field = field_of(task);
    const int64_t row = part.image * extent.rows + part.row, down = extent.down ? extent.down : extent.columns * conv_.outputs;
    const int64_t at = row * down + part.column * conv_.outputs;
    return {.rows = part.rows,
            .columns = part.columns,
            .patch = field.corner,
            .patches = field.patches,
            .runs = {field.line * conv_.dilation[0], conv_.inputs * conv_.dilation[1]},
            .count = {conv_.kernel[0], conv_.runs_across()},
            .quads = packed_.quads(),
            .place = {y + at, residual ? residual + at : nullptr},
            .results = {down, conv_.outputs},
            .fetched = residual && extent.batch * extent.rows * extent.columns * conv_.outputs > kLarge,
            .cold = packed_.bytes() > kCold && (far() || at == 0)};
  }

  Convolution conv_;
  Finish finish_;
  int64_t depth_;  // input channels of a group
  Packed<Way> packed_;
};

}  // namespace requant::REQUANT_TARGET
