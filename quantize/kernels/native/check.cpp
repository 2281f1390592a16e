// A program that compares the kernels of every instruction set of this CPU with their definition, without ONNX Runtime.
//
//   check [number of convolutions] [seed]
//
// All tensors, weights and copies of the kernels end where a page begins that nobody may touch: a read or write behind one
// of them ends the program.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "check.h"

namespace requant {
namespace {

size_t page() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

size_t whole_pages(size_t bytes) { return (bytes + page() - 1) / page() * page(); }

}  // namespace

void* take_memory(size_t bytes) {
  const size_t used = whole_pages(bytes);
  void* start = mmap(nullptr, used + page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || mprotect(static_cast<uint8_t*>(start) + used, page(), PROT_NONE)) std::abort();
  return static_cast<uint8_t*>(start) + used - bytes;
}

void release_memory(void* data, size_t bytes) {
  const size_t used = whole_pages(bytes);
  munmap(static_cast<uint8_t*>(data) + bytes - used, used + page());
}

namespace {

int16_t drawn_line(Random& random, int64_t i) {
  return static_cast<int16_t>(i < kSegments ? draw(random, -3000, 18000) : draw(random, -INT16_MAX, INT16_MAX));
}

Convolution drawn(Random& random) {
  Convolution made;
  const bool depthwise = draw(random, 0, 2) == 0;
  const int64_t groups[] = {1, 1, 1, 2, 5};
  made.group = depthwise ? draw(random, 2, 140) : groups[draw(random, 0, 4)];
  made.inputs = made.group * (depthwise ? 1 : draw(random, 1, 70));
  made.outputs = made.group * (depthwise ? 1 : draw(random, 1, 70));
  for (int axis = 0; axis < 2; ++axis) {
    made.kernel[axis] = draw(random, 1, 7);
    made.stride[axis] = draw(random, 1, 3);
    made.dilation[axis] = std::max<int64_t>(1, draw(random, -1, 3));  // mostly 1
    made.before[axis] = draw(random, 0, 3);
    made.after[axis] = draw(random, 0, 3);
  }
  if (draw(random, 0, 7) == 0) made.kernel[0] = 1;  // a sequence, if the image has one row too
  if (draw(random, 0, 3) == 0) {  // its patches may be the rows of the input
    for (int axis = 0; axis < 2; ++axis) {
      made.kernel[axis] = made.stride[axis] = 1;
      made.before[axis] = made.after[axis] = 0;
    }
    if (!depthwise) made.group = 1;
  }
  made.x_zero = static_cast<int>(draw(random, 0, 255));
  made.y_zero = static_cast<int>(draw(random, 0, 255));
  const int64_t depth = made.inputs / made.group * made.taps(), largest = draw(random, 0, 1) ? 128 : 64;
  for (int64_t i = 0; i < made.outputs * depth; ++i)
    made.weights.push_back(static_cast<int8_t>(draw(random, -largest, largest - 1)));
  for (int64_t o = 0; o < made.outputs; ++o) {
    made.bias.push_back(static_cast<int32_t>(draw(random, -100000, 100000)));
    made.multiplier.push_back(1e-6f * static_cast<float>(draw(random, 1, 100000)) / std::sqrt(static_cast<float>(depth)));
  }
  const int64_t tables[] = {0, 256, 256 * made.outputs, 0}, kind = draw(random, 0, 3);
  for (int64_t i = tables[kind]; i > 0; --i) made.table.push_back(static_cast<uint8_t>(random()));
  for (int64_t i = 0; kind == 3 && i < 2 * kSegments; ++i) made.curve.push_back(drawn_line(random, i));
  if (kind == 3)
    for (float& each : made.multiplier) each *= 200;
  made.offset = 100.0f * static_cast<float>(draw(random, -400, 400));
  made.residual_zero = static_cast<int>(draw(random, 0, 255));
  made.residual_ratio = 0.01f * static_cast<float>(draw(random, 1, 300));
  return made;
}

int64_t sum_at(const Convolution& conv, const uint8_t* image, const Extent& extent, int64_t row, int64_t column, int64_t o) {
  const int64_t depth = conv.inputs / conv.group, group = o / (conv.outputs / conv.group);
  int64_t sum = conv.bias[o];
  for (int64_t tap = 0; tap < conv.taps(); ++tap) {
    const int64_t y = row * conv.stride[0] - conv.before[0] + tap / conv.kernel[1] * conv.dilation[0];
    const int64_t x = column * conv.stride[1] - conv.before[1] + tap % conv.kernel[1] * conv.dilation[1];
    if (y < 0 || y >= extent.height || x < 0 || x >= extent.width) continue;
    const uint8_t* pixel = image + (y * extent.width + x) * conv.inputs + group * depth;
    for (int64_t i = 0; i < depth; ++i)
      sum += (pixel[i] - conv.x_zero) * conv.weights[(o * depth + i) * conv.taps() + tap];
  }
  return sum;
}

uint8_t clipped(float value, int zero) {
  return static_cast<uint8_t>(std::clamp(std::nearbyint(value) + static_cast<float>(zero), 0.0f, 255.0f));
}

// Returns what a curve makes of the place t.
uint8_t curved(const std::vector<int16_t>& curve, double t) {
  const int part = static_cast<int>(std::clamp(t, -32768.0, 32767.0)) + 0x8000, segment = part >> 10;
  const int away = 64 * (part % 1024 - 512);
  const int y = curve[segment] + ((curve[kSegments + segment] * away + 0x4000) >> 15);
  return static_cast<uint8_t>(std::clamp(std::clamp(y, -0x8000, 0x7fff) >> kStepBits, 0, 255));
}

// Returns a result, from the sum with the bias and the residual.
uint8_t result(const Convolution& conv, int64_t sum, float more, int64_t o) {
  const float real = static_cast<float>(sum);
  if (conv.curve.empty()) {
    const uint8_t value = clipped(real * conv.multiplier[o] + more, conv.y_zero);
    return conv.table.empty() ? value : conv.table[(conv.table.size() > 256 ? 256 * o : 0) + value];
  }
  return curved(conv.curve, std::nearbyint(std::fma(real, conv.multiplier[o], conv.offset) + more));
}

void define(const Convolution& conv, const uint8_t* x, const uint8_t* residual, uint8_t* y, const Extent& extent) {
  for (int64_t pixel = 0; pixel < extent.batch * extent.rows * extent.columns; ++pixel) {
    const int64_t column = pixel % extent.columns, row = pixel / extent.columns % extent.rows;
    const uint8_t* image = x + pixel / extent.columns / extent.rows * extent.height * extent.width * conv.inputs;
    for (int64_t o = 0; o < conv.outputs; ++o) {
      const int64_t at = pixel * conv.outputs + o;
      const float more = residual ? static_cast<float>(residual[at] - conv.residual_zero) * conv.residual_ratio : 0.0f;
      y[at] = result(conv, sum_at(conv, image, extent, row, column, o), more, o);
    }
  }
}

// Returns windows that are inside of some pixels.
Windows drawn_windows(Random& random, const Guarded& x, int64_t channels) {
  const int64_t pixels = static_cast<int64_t>(x.size()) / channels;
  const int64_t across_step = draw(random, 1, 3), step = draw(random, 1, 3);
  const int64_t across = draw(random, 1, std::min<int64_t>((pixels - 1) / across_step + 1, draw(random, 0, 7) ? 9 : 700));
  const int64_t left = pixels - 1 - (across - 1) * across_step, down_step = draw(random, 1, std::max<int64_t>(left, 1));
  const int64_t down = draw(random, 1, std::min<int64_t>(left / down_step + 1, 9));
  const int64_t most = std::min<int64_t>((left - (down - 1) * down_step) / step + 1, 20);
  return {.first = x.data(),
          .down = static_cast<size_t>(down),
          .across = static_cast<size_t>(across),
          .count = static_cast<size_t>(draw(random, 1, most)),
          .down_step = down_step * channels,
          .across_step = across_step * channels,
          .step = step * channels};
}

// Returns whether an instruction set finds means and maxima of windows.
bool windows_are_right(const Target& target, Random& random, const Guarded& x, int64_t channels) {
  const Windows windows = drawn_windows(random, x, channels);
  const Mean mean{0.7f / static_cast<float>(windows.pixels()), static_cast<int>(draw(random, 0, 255) * windows.pixels()),
                  static_cast<int>(draw(random, 0, 255))};
  Guarded means(windows.count * channels), maxima(means.size());
  target.vectors.mean_windows(windows, static_cast<size_t>(channels), mean, means.data());
  target.vectors.max_windows(windows, static_cast<size_t>(channels), maxima.data());
  bool right = true;
  for (size_t i = 0; i < means.size(); ++i) {
    const uint8_t* first = windows.first + static_cast<int64_t>(i) / channels * windows.step + static_cast<int64_t>(i) % channels;
    int64_t sum = -mean.shift;
    uint8_t most = 0;
    for (size_t pixel = 0; pixel < windows.pixels(); ++pixel) {
      const int64_t y = static_cast<int64_t>(pixel / windows.across), across = static_cast<int64_t>(pixel % windows.across);
      const uint8_t value = first[y * windows.down_step + across * windows.across_step];
      sum += value;
      most = std::max(most, value);
    }
    right = right && maxima.data()[i] == most;
    right = right && means.data()[i] == clipped(mean.multiplier * static_cast<float>(sum), mean.y_zero);
  }
  return right;
}

// Returns whether an instruction set adds and multiplies two tensors; the second one may repeat.
bool pairs_are_right(const Target& target, Random& random, Guarded& a) {
  const size_t size = a.size(), period = draw(random, 0, 1) ? size : static_cast<size_t>(draw(random, 1, size));
  Guarded b(period), found(size);
  for (size_t i = 0; i < period; ++i) b.data()[i] = static_cast<uint8_t>(random());
  const auto zero = [&] { return static_cast<int>(draw(random, 0, 255)); };
  Pair pair{false, {}, {zero(), zero()}, zero()};
  for (float& ratio : pair.ratio) ratio = 0.01f * static_cast<float>(draw(random, 1, 300));
  bool right = true;
  for (const bool product : {false, true}) {
    pair.product = product;
    target.vectors.combine(pair, a.data(), b.data(), size, period, found.data());
    for (size_t i = 0; i < size; ++i) {
      const float x = static_cast<float>(a.data()[i] - pair.zero[0]);
      const float other = static_cast<float>(b.data()[i % period] - pair.zero[1]) * pair.ratio[1];
      const float value = product ? x * other : x * pair.ratio[0] + other;
      right = right && found.data()[i] == clipped(value, pair.y_zero);
    }
  }
  return right;
}

// Returns whether an instruction set computes lines with a bend. Where a value is near to another integer it may be that one.
bool lines_are_right(const Target& target, Random& random, Guarded& x) {
  const bool curve = draw(random, 0, 1);
  const double near = curve ? 1.0 / 32 : 1e-3;  // values in front of a curve are larger
  BentLines lines;
  lines.period = static_cast<size_t>(draw(random, 1, 150));
  lines.bend = static_cast<int>(draw(random, 0, 255));
  lines.least = static_cast<int>(draw(random, 0, 100));
  lines.most = static_cast<int>(draw(random, 100, 255));
  for (std::vector<float>* each : {&lines.below, &lines.above, &lines.level})
    for (size_t i = 0; i < lines.period + BentLines::kBehind; ++i)
      each->push_back((curve ? 1.0f : 0.01f) * static_cast<float>(draw(random, -300, 300)));
  if (draw(random, 0, 3) == 0) {
    lines.kept = BentLines::kFlat;
    for (std::vector<float>* each : {&lines.above, &lines.level}) each->assign(2 * BentLines::kBehind, each->front());
  }
  if (curve) {
    lines.least = INT16_MIN;
    lines.most = INT16_MAX;
    for (int64_t i = 0; i < 2 * kSegments; ++i) lines.curve.push_back(drawn_line(random, i));
  }
  Guarded found(x.size());
  target.vectors.bend_lines(lines, x.data(), found.data(), x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t c = i % lines.period, same = c & lines.kept;
    const double away = x.data()[i] - lines.bend, above = std::max(away, 0.0) * lines.above[same];
    const double value = std::min(away, 0.0) * lines.below[c] + above + lines.level[same];
    const double bounded = std::clamp<double>(value, lines.least, lines.most);
    const double low = std::nearbyint(bounded - near), high = std::nearbyint(bounded + near);
    const auto is = [&](double t) { return found.data()[i] == (curve ? curved(lines.curve, t) : t); };
    if (!is(low) && !is(high)) return false;
  }
  return true;
}

// Returns whether an instruction set rounds planes to pixels. Quotients are those of a division.
bool pixels_are_right(const Target& target, Random& random) {
  const int64_t count = draw(random, 1, 100), apart = draw(random, 0, 5);
  const Planes planes{draw(random, 1, 3), count + apart, 0.001f * static_cast<float>(draw(random, 1, 100000)),
                      static_cast<int>(draw(random, 0, 255))};
  std::vector<float> from(planes.channels * count + (planes.channels - 1) * apart);
  for (float& each : from) each = static_cast<float>(draw(random, -600, 600)) / 2 * planes.scale;
  from[draw(random, 0, std::ssize(from) - 1)] = INFINITY;
  Guarded found(planes.channels * count);
  target.vectors.quantize_pixels(from.data(), count, planes, found.data());
  bool right = true;
  for (int64_t p = 0; p < count; ++p)
    for (int64_t c = 0; c < planes.channels; ++c)
      right = right && found.data()[p * planes.channels + c] == clipped(from[c * planes.step + p] / planes.scale, planes.zero);
  return right;
}

// Returns whether an instruction set computes what is between pixels. Values in float differ from these by less than `kNear`.
bool interpolations_are_right(const Target& target, Random& random) {
  constexpr double kNear = 1e-3;
  const int64_t columns = draw(random, 1, 12), channels = draw(random, 1, draw(random, 0, 1) ? 20 : 150);
  const int64_t count = draw(random, 1, 30);
  Guarded first(columns * channels), second(columns * channels), found(count * channels);
  for (Guarded* each : {&first, &second})
    for (size_t i = 0; i < each->size(); ++i) each->data()[i] = static_cast<uint8_t>(draw(random, 0, 255));
  const auto share = [&] { return static_cast<float>(draw(random, 0, 64)) / 64; };
  const RowPair rows{first.data(), second.data(), share(), columns, channels, 0.25f + 2 * share(),
                     static_cast<int>(draw(random, 0, 255)), static_cast<int>(draw(random, 0, 255))};
  std::vector<Between> places(count);
  for (Between& each : places) {
    each.first = draw(random, 0, columns - 1);
    each = {each.first, std::min(each.first + 1, columns - 1), share()};
  }
  target.vectors.interpolate(rows, places.data(), count, found.data());
  const auto between = [](double a, double b, double at) { return a + (b - a) * at; };
  const auto down = [&](int64_t i) { return between(first.data()[i], second.data()[i], rows.share) - rows.zero; };
  bool right = true;
  for (int64_t p = 0; p < count; ++p)
    for (int64_t c = 0; c < channels; ++c) {
      const double value = between(down(places[p].first * channels + c), down(places[p].second * channels + c), places[p].share);
      const double expected = std::clamp(rows.ratio * value + rows.y_zero, 0.0, 255.0);
      right = right && std::abs(found.data()[p * channels + c] - expected) < 0.5 + kNear;
    }
  return right;
}

// Returns whether an instruction set adds the values at each place of some rows, and their squares, to what was there.
bool moments_are_right(const Target& target, Random& random) {
  const size_t rows = draw(random, 1, 40), length = draw(random, 1, 200), stride = length + draw(random, 0, 9);
  Guarded from(rows * length);
  for (size_t i = 0; i < from.size(); ++i) from.data()[i] = static_cast<uint8_t>(random());
  std::vector<uint32_t> found(2 * stride, 7), expected(found);
  for (size_t i = 0; i < from.size(); ++i) {
    const uint32_t x = from.data()[i];
    expected[i % length] += x;
    expected[stride + i % length] += x * x;
  }
  target.vectors.add_moments(from.data(), rows, length, stride, found.data());
  return found == expected;
}

// Returns whether an instruction set writes the rows of the result apart, and nothing between them.
bool rows_apart_are_right(const Target& target, Random& random, const Convolution& conv, const uint8_t* x, Extent extent,
                          const uint8_t* expected) {
  const int64_t line = extent.columns * conv.outputs, rows = extent.batch * extent.rows;
  extent.down = line + draw(random, 1, 40);
  Guarded found((rows - 1) * extent.down + line);
  std::memset(found.data(), 7, found.size());
  target.convolution(conv)->run(x, nullptr, found.data(), extent, serial);
  bool right = true;
  for (size_t i = 0; i < found.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / extent.down, at = static_cast<int64_t>(i) % extent.down;
    right = right && found.data()[i] == (at < line ? expected[row * line + at] : 7);
  }
  return right;
}

// Returns whether all instruction sets compute one drawn convolution, and other functions of its tensors, rightly.
bool check_one(uint64_t seed) {
  Random random(seed);
  const Convolution conv = drawn(random);
  const int64_t most = draw(random, 0, 15) ? 12 : 150;  // rows; many are divided into bands
  const int64_t wide = draw(random, 0, 7) ? 12 : 40;    // columns; many are divided into strips
  const int64_t height = conv.kernel[0] == 1 && draw(random, 0, 1) ? 1 : draw(random, 1, most);
  Extent extent{draw(random, 1, 3), height, draw(random, 1, height == 1 ? 100 : wide), 0, 0};
  extent.rows = conv.length(0, extent.height);
  extent.columns = conv.length(1, extent.width);
  if (extent.rows < 1 || extent.columns < 1) return true;
  Guarded x(extent.batch * extent.height * extent.width * conv.inputs);
  Guarded expected(extent.batch * extent.rows * extent.columns * conv.outputs), found(expected.size()), table(256);
  for (size_t i = 0; i < x.size(); ++i) x.data()[i] = static_cast<uint8_t>(random());
  for (size_t i = 0; i < table.size(); ++i) table.data()[i] = static_cast<uint8_t>(random());
  Guarded other(expected.size());
  for (size_t i = 0; i < other.size(); ++i) other.data()[i] = static_cast<uint8_t>(random());
  const uint8_t* residual = conv.depthwise() || draw(random, 0, 1) ? nullptr : other.data();
  define(conv, x.data(), residual, expected.data(), extent);
  for (const Target* target : targets()) {
    if (!target->available()) continue;
    std::memset(found.data(), 0, found.size());
    target->convolution(conv)->run(x.data(), residual, found.data(), extent, serial);
    bool right = !std::memcmp(found.data(), expected.data(), found.size());
    if (residual) {  // results may take its place
      std::memcpy(found.data(), residual, found.size());
      target->convolution(conv)->run(x.data(), found.data(), found.data(), extent, serial);
      right = right && !std::memcmp(found.data(), expected.data(), found.size());
    }
    if (!residual && !conv.depthwise())
      right = right && rows_apart_are_right(*target, random, conv, x.data(), extent, expected.data());
    target->vectors.lookup(expected.data(), found.data(), found.size(), table.data());
    for (size_t i = 0; i < found.size(); ++i) right = right && found.data()[i] == table.data()[expected.data()[i]];
    right = right && windows_are_right(*target, random, x, conv.inputs);
    right = right && pairs_are_right(*target, random, x) && pixels_are_right(*target, random);
    right = right && lines_are_right(*target, random, x);
    right = right && interpolations_are_right(*target, random) && moments_are_right(*target, random);
    right = right && floats_are_right(*target, random);
    if (!right) std::printf("%s differs from its definition, seed %llu\n", target->name, static_cast<unsigned long long>(seed));
    if (!right) return false;
  }
  return true;
}

}  // namespace
}  // namespace requant

int main(int count, char** arguments) {
  const uint64_t many = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1000;
  const uint64_t first = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
  for (uint64_t seed = first; seed < first + many; ++seed)
    if (!requant::check_one(seed)) return 1;
  std::printf("%llu convolutions are equal on:", static_cast<unsigned long long>(many));
  for (const requant::Target* target : requant::targets())
    if (target->available()) std::printf(" %s", target->name);
  std::printf("\n");
  return 0;
}
