// The attributes of operators that move a kernel over an image.
#pragma once

#include <algorithm>

#include "ort.h"
#include "target.h"

namespace requant {

inline void read_pair(const ort::Node& node, const char* name, int64_t (&into)[2]) {
  const std::vector<int64_t> values = node.attributes(name, {into[0], into[1]});
  if (values.size() != 2) throw ort::Failure(std::string("ai.requant: ") + name + " must have two values");
  for (int axis = 0; axis < 2; ++axis) {
    if (values[axis] < 1 || values[axis] > INT32_MAX)
      throw ort::Failure(std::string("ai.requant: ") + name + " must be positive");
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
    if (least < 0 || most > INT32_MAX) throw ort::Failure("ai.requant: pads must not be negative");
  }
}

}  // namespace requant
