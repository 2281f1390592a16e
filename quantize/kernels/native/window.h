// The attributes of operators that move a kernel over an image.
#pragma once

#include <algorithm>

#include "ort.h"
#include "target.h"

namespace requant {

// The longest stride, dilation or pad: int64 holds the size of all that a kernel reaches over. FARTHEST in Python.
constexpr int64_t kFarthest = 1 << 15;

inline void read_pair(const ort::Node& node, const char* name, int64_t (&into)[2]) {
  const std::vector<int64_t> values = node.attributes(name, {into[0], into[1]});
  if (values.size() != 2) throw ort::Failure(std::string("ai.requant: ") + name + " must have two values");
  for (int axis = 0; axis < 2; ++axis) {
    if (values[axis] < 1 || values[axis] > kFarthest)
      throw ort::Failure(std::string("ai.requant: ") + name + " must be from 1 to 32768");
    into[axis] = values[axis];
  }
}

// Reads strides, dilations and pads; the kernel of a convolution is the shape of its weights.
inline void read_window(const ort::Node& node, Window& made) {
  read_pair(node, "strides", made.stride);
  read_pair(node, "dilations", made.dilation);
  const std::vector<int64_t> pads = node.attributes("pads", {0, 0, 0, 0});
  if (pads.size() != 4) throw ort::Failure("ai.requant: pads must have four values");
  for (int axis = 0; axis < 2; ++axis) {
    made.before[axis] = pads[axis];
    made.after[axis] = pads[axis + 2];
    const auto [least, most] = std::minmax(made.before[axis], made.after[axis]);
    if (least < 0 || most > kFarthest) throw ort::Failure("ai.requant: pads must be from 0 to 32768");
  }
}

}  // namespace requant
