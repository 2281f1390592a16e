// Weights in the order in which products read them.
//
// A panel holds the weights of a few vectors of output channels. Its bytes stand in this order: quads of the patch, vectors,
// channels, then the four of a quad. A run of a patch is padded with zeros to whole quads.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "aligned.h"
#include "border.h"
#include "finish.h"
#include "target.h"

namespace requant::REQUANT_TARGET {

// `Way` is how patches are multiplied, in vectors or in tiles: it says how many quads a run has and how wide a panel is.
template <class Way>
class Packed {
 public:
  explicit Packed(const Convolution& conv)
      : depth_(conv.inputs / conv.group),
        width_(conv.outputs / conv.group),
        run_(conv.run_bytes()),
        quads_(Way::quads(run_)) {
    const int64_t vectors = divided(width_, kLanes);
    const int64_t bytes = kBytes * quads_ * conv.runs();    // of a vector of channels
    starts_.reserve(conv.group * vectors * kLanes);  // the panels point into these
    multipliers_.reserve(conv.group * vectors * kLanes);
    weights_.assign(conv.group * vectors * bytes, 0);
    uint8_t* to = weights_.data();
    for (int64_t group = 0; group < conv.group; ++group)
      for (int64_t first = 0; first < vectors;) {
        const int64_t wide = Way::vectors(vectors - first, bytes / kLanes);
        add_panel(conv, group, first, static_cast<int>(wide), to);
        first += wide;
        to += wide * bytes;
      }
  }

  int64_t quads() const { return quads_; }  // of a run
  int64_t padding() const { return 4 * quads_ - run_; }  // bytes behind a run that are read too
  int64_t bytes() const { return static_cast<int64_t>(weights_.size()); }
  const std::vector<Panel>& panels() const { return panels_; }  // those of a group follow each other

 private:
  void add_panel(const Convolution& conv, int64_t group, int64_t first, int vectors, uint8_t* to) {
    Panel panel = panel_of_vectors(width_, first, vectors);
    panel.channel += group * width_;
    panel.input = group * depth_;
    panel.start = starts_.data() + starts_.size();
    panel.multiplier = multipliers_.data() + multipliers_.size();
    panel.weights = to;
    for (int vector = 0; vector < vectors; ++vector)
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const bool there = lane < panel.bytes;
        const int64_t o = panel.channel + panel.offset(vector, vectors) + lane;
        const int32_t sum = there ? pack_channel(conv, o, to + vector * kBytes + 4 * lane, vectors * kBytes, panel) : 0;
        starts_.push_back(there ? conv.bias[o] - (conv.x_zero - kOffset) * sum : 0);
        multipliers_.push_back(there ? conv.multiplier[o] : 0.0f);
      }
    panels_.push_back(panel);
  }

  // Writes the weights of a channel, quads `step` bytes apart, and returns their sum.
  int32_t pack_channel(const Convolution& conv, int64_t o, uint8_t* to, int64_t step, Panel& panel) const {
    int32_t sum = 0;
    const int64_t taps = run_ / depth_;  // of a run
    for (int64_t first = 0; first < conv.taps(); first += taps)
      for (int64_t quad = 0; quad < quads_; ++quad, to += step) {
        int8_t four[4] = {};
        for (int64_t i = 0; i < std::min<int64_t>(4, run_ - 4 * quad); ++i) {
          const int64_t tap = first + (4 * quad + i) / depth_, channel = (4 * quad + i) % depth_;
          sum += four[i] = conv.weights[(o * depth_ + channel) * conv.taps() + tap];
        }
        std::memcpy(to, four, 4);
        panel.narrow = panel.narrow && fits_narrow(four);
      }
    return sum;
  }

  int64_t depth_, width_;    // input and output channels of a group
  int64_t run_, quads_;      // bytes and quads of a run
  Aligned<uint8_t> weights_;
  Aligned<int32_t> starts_;  // the bias without the parts of x_zero and kOffset
  Aligned<float> multipliers_;
  std::vector<Panel> panels_;
};

}  // namespace requant::REQUANT_TARGET
