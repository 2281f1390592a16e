// Comparisons of what has results in float.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "check.h"
#include "head_parts.h"

namespace requant {
namespace {

// Returns f(x).
double applied(Function function, double x) {
  const double cubic = std::sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x);
  if (function == Function::kRelu) return std::max(x, 0.0);
  if (function == Function::kSilu) return x / (1 + std::exp(-x));
  if (function == Function::kGelu) return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
  return function == Function::kGeluByTanh ? x * 0.5 * (1 + std::tanh(cubic)) : x;
}

// Returns whether an instruction set multiplies rows by a matrix. The order of the roundings to float differs.
bool matrices_are_right(const Target& target, Random& random) {
  const int64_t rows = draw(random, 1, draw(random, 0, 3) ? 6 : 70);
  const int64_t inputs = draw(random, 1, 300), outputs = draw(random, 1, 150);
  Matrix made{inputs, outputs, std::vector<int8_t>(inputs * outputs), std::vector<float>(outputs), std::vector<float>(outputs),
              Function{draw(random, 0, 4)}, draw(random, 0, 1) == 1};
  for (int8_t& each : made.weights) each = static_cast<int8_t>(draw(random, -128, 127));
  const auto real = [&](double most) { return static_cast<float>(most * (static_cast<double>(random() >> 11) * 0x1p-52 - 1)); };
  for (float& each : made.scale) each = std::abs(real(0.01));
  for (float& each : made.bias) each = real(3);
  Guarded x(rows * inputs * sizeof(float)), y(rows * outputs * sizeof(float));
  float *from = reinterpret_cast<float*>(x.data()), *found = reinterpret_cast<float*>(y.data());
  const double lift = draw(random, 0, 2) ? 0 : 5;
  for (int64_t i = 0; i < rows * inputs; ++i)
    from[i] = draw(random, 0, 40) && i / inputs != 1 ? real(3) + static_cast<float>(lift) : 0.0f;
  std::vector<float> more(rows * outputs);
  for (float& each : more) each = real(2);
  const bool adds = draw(random, 0, 1) == 1;
  target.matrix(made)->run(from, adds ? more.data() : nullptr, found, rows, serial);
  for (int64_t row = 0; row < rows; ++row, from += inputs) {
    const float least = std::min(0.0f, *std::min_element(from, from + inputs));
    const float step = std::max(0.0f, *std::max_element(from, from + inputs)) / 255 - least / 255;
    const float inverse = step > 0 ? 1 / step : 0, zero = std::nearbyint(-least * inverse);
    for (int64_t o = 0; o < outputs; ++o) {
      int64_t sum = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        const float rounded = std::clamp(std::nearbyint(from[i] * inverse) + zero, 0.0f, 255.0f) - zero;
        sum += static_cast<int64_t>(rounded) * made.weights[o * inputs + i];
      }
      const double scale = static_cast<double>(step) * made.scale[o], value = scale * static_cast<double>(sum) + made.bias[o];
      const double residual = static_cast<double>(more[row * outputs + o]), plain = applied(made.function, value);
      const double f = !adds ? plain : made.gated ? plain * residual : plain + residual;
      // three roundings to float of numbers below this one, and the error of the function
      const double size = scale * 255 * 128 * static_cast<double>(inputs) + std::abs(static_cast<double>(made.bias[o]));
      const double grown = adds && made.gated ? std::max(1.0, std::abs(residual)) : 1.0;
      if (std::abs(found[row * outputs + o] - f) > (0x1p-21 * size + 4e-6) * grown) return false;
    }
  }
  return true;
}

// Returns a row rounded to integers from -127 to 127, or a column if its values are `step` apart, and the size of a step.
std::pair<std::vector<int>, double> evenly(const float* x, int64_t count, int64_t step) {
  float peak = 0;
  for (int64_t i = 0; i < count; ++i) peak = std::max(peak, std::abs(x[i * step]));
  const float size = peak / 127, inverse = size > 0 ? 1 / size : 0;
  std::vector<int> made;
  for (int64_t i = 0; i < count; ++i) made.push_back(static_cast<int>(std::nearbyint(x[i * step] * inverse)));
  return {made, size};
}

// Returns a weight as an integer.
int weight_of(const BlockMatrix& made, int64_t output, int64_t block, int64_t i) {
  const uint8_t* const from = made.codes + (output * made.blocks() + block) * made.bytes();
  return (made.bits == 8 ? from[i] : from[i / 2] >> 4 * (i % 2) & 15) - made.zero();
}

// Returns whether an instruction set multiplies rows by a matrix in blocks.
bool block_matrices_are_right(const Target& target, Random& random) {
  const int64_t rows = draw(random, 1, draw(random, 0, 3) ? 10 : 70), sizes[] = {16, 32, 64, 128, 256};
  const bool deep = draw(random, 0, 9) == 0;  // more inputs than tiles add at once
  BlockMatrix made{.inputs = deep ? draw(random, 2049, 4300) : draw(random, 1, 300),
                   .outputs = draw(random, 1, deep ? 40 : 150),
                   .bits = draw(random, 0, 1) ? 4 : 8,
                   .size = sizes[draw(random, 0, 4)],
                   .bias = {},
                   .function = Function{draw(random, 0, 4)},
                   .gated = draw(random, 0, 1) == 1};
  const auto real = [&](double most) { return static_cast<float>(most * (static_cast<double>(random() >> 11) * 0x1p-52 - 1)); };
  Guarded codes(made.outputs * made.blocks() * made.bytes()), scales(4 * made.outputs * made.blocks());
  for (size_t i = 0; i < codes.size(); ++i) codes.data()[i] = static_cast<uint8_t>(random());
  float* const scale = reinterpret_cast<float*>(scales.data());
  for (int64_t i = 0; i < made.outputs * made.blocks(); ++i) scale[i] = real(0.01);
  made.codes = codes.data();
  made.scale = scale;
  for (int64_t o = 0; o < made.outputs; ++o) made.bias.push_back(real(3));
  Guarded x(4 * rows * made.inputs), more(4 * rows * made.outputs), y(4 * rows * made.outputs);
  const auto floats = [](Guarded& of) { return reinterpret_cast<float*>(of.data()); };
  for (int64_t i = 0; i < rows * made.inputs; ++i) floats(x)[i] = draw(random, 0, 40) && i / made.inputs != 1 ? real(3) : 0.0f;
  for (int64_t i = 0; i < rows * made.outputs; ++i) floats(more)[i] = real(2);
  const bool adds = draw(random, 0, 1) == 1;
  target.block_matrix(made)->run(floats(x), adds ? floats(more) : nullptr, floats(y), rows, serial);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t o = 0; o < made.outputs; ++o) {
      double value = made.bias[o], size = std::abs(value), exact = value, span = size;
      for (int64_t block = 0; block < made.blocks(); ++block) {
        const int64_t first = block * made.size, there = std::min(made.size, made.inputs - first);
        const float* const from = floats(x) + row * made.inputs + first;
        const auto [integers, step] = evenly(from, there, 1);
        const double of_block = scale[o * made.blocks() + block], each = step * of_block;
        int64_t sum = 0;
        for (int64_t i = 0; i < there; ++i) {
          const int weight = weight_of(made, o, block, i);
          sum += integers[i] * weight;
          exact += of_block * weight * from[i];
          span += std::abs(of_block * weight * from[i]);
        }
        value += each * static_cast<double>(sum);
        size += std::abs(each * static_cast<double>(sum));
      }
      const double residual = adds ? floats(more)[row * made.outputs + o] : 0.0f, found = floats(y)[row * made.outputs + o];
      const bool gated = adds && made.gated;
      const auto off_from = [&](double sum) {
        const double plain = applied(made.function, sum);
        return std::abs(found - (gated ? plain * residual : plain + residual));
      };
      // each block, the bias and the residual are rounded to float once more
      const double grown = gated ? std::max(1.0, std::abs(residual)) : 1.0;
      const double near = (0x1p-22 * (size + std::abs(residual)) * (3 + made.blocks()) + 4e-6) * grown;
      // tiles round both factors of many rows to 8 binary digits
      const bool in_tiles = rows >= 32 && !std::strcmp(target.name, "amx") && off_from(exact) <= 1.2 * 0x1p-7 * span * grown;
      if (off_from(value) > near && !in_tiles) return false;
    }
  return true;
}

// Returns a score as attention takes it: capped, with the mask, and -infinity for a key that the query does not see.
double taken(const AttentionSize& size, double score, double mask, int64_t row, int64_t key) {
  if (key >= size.seen_by(row) || key < size.hidden_before(row)) return -INFINITY;
  const double cap = size.cap;
  return (cap > 0 ? cap * std::tanh(score / cap) : score) + mask;
}

// Returns what the masks add to a score. The first one has a value for each key.
double added(const Head& head, int64_t row, int64_t key) {
  const double first = head.mask == nullptr ? 0 : static_cast<double>(head.mask[key]);
  return first + (head.window == nullptr ? 0 : static_cast<double>(head.window[row * head.window_step + key]));
}

// Returns whether results of attention are those of float.
bool few_queries_are_right(const AttentionSize& size, const Head& head) {
  for (int64_t row = 0; row < size.queries; ++row) {
    std::vector<double> scores;
    double span = 0;  // of what is rounded to float on the way to a score
    for (int64_t key = 0; key < size.seen_by(row); ++key) {
      double score = 0, each = 0;
      for (int64_t i = 0; i < size.depth; ++i) {
        const double part = static_cast<double>(size.scale) * head.q[row * head.q_step + i] * head.k[key * head.k_step + i];
        score += part;
        each += std::abs(part);
      }
      scores.push_back(taken(size, score, added(head, row, key), row, key));
      span = std::max(span, each);
    }
    const double most = *std::max_element(scores.begin(), scores.end()), blur = 3e-4 + 0x1p-20 * span;  // of a share, relative
    for (int64_t o = 0; o < size.width; ++o) {
      double sum = std::exp(head.sink - most), value = 0, whole = 0, widest = 0;
      for (size_t key = 0; key < scores.size(); ++key) {
        const double share = std::exp(scores[key] - most), of_key = head.v[static_cast<int64_t>(key) * head.v_step + o];
        sum += share;
        value += share * of_key;
        whole += share * std::abs(of_key);
        widest = std::max(widest, std::abs(of_key));
      }
      const double lost = 0x1p-29 * static_cast<double>(scores.size()) * widest;  // shares below 2^-30
      if (!(std::abs(head.y[row * head.y_step + o] - value / sum) <= 2 * blur * whole / sum + lost + 1e-6)) return false;
    }
  }
  return true;
}

// Rounds rows of floats, `step` apart, to the bytes and steps of a cache, and replaces them by what these stand for. Returns
// whether they are right.
bool cache(const Target& target, float* rows, int64_t count, int64_t columns, int64_t step, uint8_t* bytes, float* steps) {
  bool right = true;
  for (int64_t row = 0; row < count; ++row, rows += step, bytes += columns) {
    steps[row] = target.vectors.round_row(rows, columns, bytes);
    const auto [expected, size] = evenly(rows, columns, 1);
    right &= static_cast<double>(steps[row]) == size;
    for (int64_t i = 0; i < columns; ++i) {
      right &= bytes[i] == expected[i] + kCacheZero;
      rows[i] = steps[row] * static_cast<float>(bytes[i] - kCacheZero);
    }
  }
  return right;
}

// Returns whether an instruction set computes attention. Only a share near a half may be rounded to another integer.
bool attentions_are_right(const Target& target, Random& random) {
  AttentionSize size{draw(random, 1, 80), draw(random, 1, 150), draw(random, 1, 70), draw(random, 1, 70), 0.3f, 0, true};
  size.first_seen = draw(random, 0, 1) ? size.keys : draw(random, 1, size.keys);
  if (size.first_seen + size.queries - 1 <= size.keys && draw(random, 0, 2)) size.window = draw(random, 1, size.keys);
  if (draw(random, 0, 2) == 0) size.cap = 3;
  const float sink = draw(random, 0, 2) ? -INFINITY : static_cast<float>(draw(random, -3, 3));
  const int64_t gap = draw(random, 0, 3), masked = draw(random, 0, 1);
  const auto drawn = [&](int64_t rows, int64_t columns) {
    std::vector<float> made(rows * (columns + gap) - gap);
    for (float& each : made) each = static_cast<float>(static_cast<double>(random() >> 11) * 0x1p-51 - 2);
    return made;
  };
  std::vector<float> q = drawn(size.queries, size.depth), k = drawn(size.keys, size.depth), v = drawn(size.keys, size.width);
  std::vector<float> mask(size.keys);
  for (float& each : mask) each = masked && draw(random, 0, 2) == 0 ? -3e38f : 0.0f;
  mask[draw(random, 0, size.keys - 1)] = 0;
  const bool unseen = masked && draw(random, 0, 9) == 0;
  if (unseen) std::fill(mask.begin(), mask.end(), -INFINITY);
  std::fill_n(q.begin(), draw(random, 0, 1) * size.depth, 0.0f);
  Guarded rows[] = {Guarded(q.size() * 4), Guarded(k.size() * 4), Guarded(v.size() * 4)}, y(size.queries * size.width * 4);
  Guarded caches[] = {Guarded(size.keys * size.depth), Guarded(size.keys * size.width), Guarded(size.keys * 4),
                      Guarded(size.keys * 4)};
  const auto steps = [&](int index) { return reinterpret_cast<float*>(caches[2 + index].data()); };
  const bool cached = draw(random, 0, 1) == 1;
  if (cached && !(cache(target, k.data(), size.keys, size.depth, size.depth + gap, caches[0].data(), steps(0)) &&
                  cache(target, v.data(), size.keys, size.width, size.width + gap, caches[1].data(), steps(1))))
    return false;
  std::memcpy(rows[0].data(), q.data(), q.size() * 4);
  std::memcpy(rows[1].data(), k.data(), k.size() * 4);
  std::memcpy(rows[2].data(), v.data(), v.size() * 4);
  const auto at = [&](int index) { return reinterpret_cast<const float*>(rows[index].data()); };
  Guarded window(size.queries * size.keys * 4);
  float* const second = reinterpret_cast<float*>(window.data());
  for (int64_t i = 0; i < size.queries * size.keys; ++i)
    second[i] = draw(random, 0, 3) ? static_cast<float>(draw(random, -3, 3)) : -100.0f;
  const Head head{at(0), at(1), at(2), masked ? mask.data() : nullptr, reinterpret_cast<float*>(y.data()), size.depth + gap,
                  size.depth + gap, size.width + gap, 0, size.width, false, sink, {}, {},
                  draw(random, 0, 2) ? nullptr : second, size.keys};
  Head given = head;
  if (cached) {
    given.k = given.v = nullptr;
    given.k_cache = {caches[0].data(), steps(0)};
    given.v_cache = {caches[1].data(), steps(1)};
  }
  attend(target, size, given, {0, size.queries, 0, size.keys});
  const float* const results = reinterpret_cast<const float*>(y.data());
  if (unseen) return std::all_of(results, results + size.queries * size.width, [](float each) { return each == 0; });
  if (size.queries <= kFewQueries) return few_queries_are_right(size, head);
  for (int64_t row = 0; row < size.queries; ++row) {
    const float* x = q.data() + row * (size.depth + gap);
    const float least = std::min(0.0f, *std::min_element(x, x + size.depth));
    const float step = std::max(0.0f, *std::max_element(x, x + size.depth)) / 255 - least / 255;
    const float inverse = step > 0 ? 1 / step : 0, zero = std::nearbyint(-least * inverse);
    std::vector<double> scores;
    double span = 0;  // of what is rounded to float on the way to a score
    for (int64_t key = 0; key < size.keys; ++key) {
      const auto [of_key, scale] = evenly(k.data() + key * (size.depth + gap), size.depth, 1);
      int64_t sum = 0;
      for (int64_t i = 0; i < size.depth; ++i)
        sum += static_cast<int64_t>(std::clamp(std::nearbyint(x[i] * inverse) + zero, 0.0f, 255.0f) - zero) * of_key[i];
      scores.push_back(taken(size, scale * step * size.scale * static_cast<double>(sum), added(head, row, key), row, key));
      span = std::max(span, scale * step * size.scale * 255 * 127 * static_cast<double>(size.depth));
    }
    const double most = *std::max_element(scores.begin(), scores.end()), blur = 3e-4 + 0x1p-20 * span;  // of a share, relative
    std::vector<double> share, unsure;
    double sum = 0, doubtful = 0, whole = 0;
    for (double score : scores) {
      const double exact = 255 * std::exp(score - most), off = std::abs(exact - std::floor(exact) - 0.5);
      share.push_back(std::nearbyint(exact));
      unsure.push_back(off <= blur * exact + 1e-4 ? 1 : 0);
      sum += share.back();
      whole += exact;
      doubtful += unsure.back();
    }
    const double unused = 255 * std::exp(sink - most), exact_all = whole + unused, all = sum + unused;
    for (int64_t o = 0; o < size.width; ++o) {
      const auto [of_column, scale] = evenly(v.data() + o, size.keys, size.width + gap);
      double value = 0, allowed = 0, real = 0, size_of_real = 0, fine = 0;
      for (int64_t key = 0; key < size.keys; ++key) {
        value += share[key] * of_column[key] * scale / all;
        allowed += unsure[key] * std::abs(of_column[key]) * scale / (all - doubtful);
        const double part = std::exp(scores[key] - most) * 255 / exact_all * of_column[key] * scale;
        real += part;
        size_of_real += std::abs(part);
        fine += std::abs(of_column[key]) * scale / 256 / exact_all;
      }
      fine += std::abs(real) * static_cast<double>(size.keys) / 256 / exact_all;
      allowed += std::abs(value) * doubtful / (all - doubtful) + 0x1p-20 * scale * 127;
      const float found = results[row * size.width + o];
      const bool exact = std::abs(found - real) <= 2 * blur * size_of_real + fine + 1e-6;
      const bool rounded = std::abs(found - value) <= allowed;
      const double off = std::abs(whole - sum) / sum;  // above a 32nd the shares of the row have 16 bits
      if (!((exact && off > 1.0 / 33) || (rounded && off < 1.0 / 31 + doubtful / sum))) return false;
    }
  }
  return true;
}

// Returns whether an instruction set computes the steps of a GRU.
bool gru_steps_are_right(const Target& target, Random& random) {
  const int64_t size = draw(random, 1, 50);
  Guarded tensors[] = {Guarded(12 * size), Guarded(12 * size), Guarded(4 * size), Guarded(4 * size), Guarded(4 * size)};
  const auto at = [&](int index) { return reinterpret_cast<float*>(tensors[index].data()); };
  for (int index = 0; index < 4; ++index)
    for (int64_t i = 0; i < (index < 2 ? 3 : 1) * size; ++i)
      at(index)[i] = static_cast<float>(static_cast<double>(random() >> 11) * 0x1p-49 - 8);
  const float *x = at(0), *h = at(1), *last = at(2), *before = at(3), *found = at(4);
  const auto gate = [&](int64_t i) { return 1 / (1 + std::exp(-(static_cast<double>(x[i]) + h[i]))); };
  bool right = true;
  for (bool reset_first : {false, true}) {
    const GruStep step{x, h, last, before, size, reset_first};
    target.vectors.next_state(step, at(4));
    for (int64_t i = 0; i < size; ++i) {
      const double n = std::tanh(x[2 * size + i] + (reset_first ? 1 : gate(size + i)) * last[i]);
      right = right && std::abs(found[i] - (n + gate(i) * (before[i] - n))) <= 2e-3;  // 1e-4 of numbers up to 8
    }
    target.vectors.reset_state(step, at(4));
    for (int64_t i = 0; i < size; ++i) right = right && std::abs(found[i] - gate(size + i) * before[i]) <= 1e-3;
  }
  return right;
}

// Returns whether an instruction set multiplies rows by a panel of floats.
bool float_panels_are_right(const Target& target, Random& random) {
  const int64_t rows = draw(random, 1, 11), inputs = draw(random, 1, 90), columns = draw(random, 1, kFloatPanel);
  const int64_t step = columns + draw(random, 0, 40);
  Guarded tensors[] = {Guarded(4 * inputs * kFloatPanel), Guarded(4 * kFloatPanel), Guarded(4 * rows * inputs),
                       Guarded(4 * ((rows - 1) * step + columns))};
  const auto at = [&](int index) { return reinterpret_cast<float*>(tensors[index].data()); };
  const int64_t sizes[] = {inputs * kFloatPanel, kFloatPanel, rows * inputs};
  for (int index = 0; index < 3; ++index)
    for (int64_t i = 0; i < sizes[index]; ++i) at(index)[i] = static_cast<float>(static_cast<double>(random() >> 11) * 0x1p-51 - 2);
  std::fill_n(at(3), (rows - 1) * step + columns, 5.0f);
  target.vectors.multiply_floats({at(0), at(1), inputs, columns, step}, at(2), at(3), rows);
  bool right = true;
  for (int64_t i = 0; i < (rows - 1) * step + columns; ++i) {
    const int64_t row = i / step, column = i % step;
    double sum = 5;
    for (int64_t k = 0; column < columns && k < inputs; ++k)
      sum = (k ? sum : at(1)[column]) + static_cast<double>(at(2)[row * inputs + k]) * at(0)[k * kFloatPanel + column];
    right = right && std::abs(at(3)[i] - sum) <= 0x1p-19 * static_cast<double>(inputs);
  }
  return right;
}

// Returns whether an instruction set computes the steps of an LSTM.
bool lstm_steps_are_right(const Target& target, Random& random) {
  const int64_t size = draw(random, 1, 50);
  Guarded tensors[] = {Guarded(16 * size), Guarded(16 * size), Guarded(4 * size), Guarded(4 * size), Guarded(4 * size)};
  const auto at = [&](int index) { return reinterpret_cast<float*>(tensors[index].data()); };
  for (int index = 0; index < 3; ++index)
    for (int64_t i = 0; i < (index < 2 ? 4 : 1) * size; ++i)
      at(index)[i] = static_cast<float>(static_cast<double>(random() >> 11) * 0x1p-49 - 8);
  const float *x = at(0), *h = at(1), *before = at(2), *found = at(4);
  float* const cell = at(3);
  std::copy_n(before, size, cell);
  target.vectors.next_cell({x, h, cell, size}, at(4));
  const auto sum = [&](int64_t i) { return static_cast<double>(x[i]) + h[i]; };
  const auto gate = [&](int64_t i) { return 1 / (1 + std::exp(-sum(i))); };
  bool right = true;
  for (int64_t i = 0; i < size; ++i) {
    const double kept = gate(2 * size + i) * before[i] + gate(i) * std::tanh(sum(3 * size + i));
    right = right && std::abs(cell[i] - kept) <= 2e-3;  // 1e-4 of numbers up to 8
    right = right && std::abs(found[i] - gate(size + i) * std::tanh(static_cast<double>(cell[i]))) <= 3e-4;
  }
  return right;
}

// Returns whether an instruction set computes the softmax of items that are rows, or that lie side by side; of floats, or of
// bytes times a scale.
bool softmaxes_are_right(const Target& target, Random& random) {
  const bool rows = draw(random, 0, 1) == 0, of_bytes = draw(random, 0, 1) == 0;
  const float scale = 0.37f;
  const int64_t classes = draw(random, 1, draw(random, 0, 1) ? 16 : 200), count = draw(random, 1, draw(random, 0, 1) ? 20 : 700);
  const Classes size{classes, rows ? 1 : count + draw(random, 1, 3), count};
  const int64_t apart = rows ? classes : 1, all = 1 + (classes - 1) * size.step + (count - 1) * apart;
  Guarded tensors[] = {Guarded(4 * all), Guarded(4 * all), Guarded(all)};
  float *const x = reinterpret_cast<float*>(tensors[0].data()), *const found = reinterpret_cast<float*>(tensors[1].data());
  uint8_t* const bytes = tensors[2].data();
  for (int64_t i = 0; i < all; ++i) {
    bytes[i] = static_cast<uint8_t>(random());
    const double drawn = static_cast<double>(random() >> 11) * 0x1p-47 - 32;
    x[i] = of_bytes ? scale * static_cast<float>(bytes[i]) : static_cast<float>(drawn);
  }
  of_bytes ? target.vectors.softmax_of_bytes(size, bytes, scale, found) : target.vectors.softmax(size, x, found);
  bool right = true;
  for (int64_t i = 0; i < count; ++i) {
    const auto value = [&](int64_t c) { return static_cast<double>(x[i * apart + c * size.step]); };
    double most = value(0), sum = 0;
    for (int64_t c = 1; c < classes; ++c) most = std::max(most, value(c));
    for (int64_t c = 0; c < classes; ++c) sum += std::exp(value(c) - most);
    for (int64_t c = 0; c < classes; ++c) {
      const double expected = std::exp(value(c) - most) / sum, away = found[i * apart + c * size.step] - expected;
      right = right && std::abs(away) <= 5e-6 * expected + 1e-30;  // half of the last bit of a difference up to 64
    }
  }
  return right;
}

}  // namespace

bool floats_are_right(const Target& target, Random& random) {
  return matrices_are_right(target, random) && block_matrices_are_right(target, random) && attentions_are_right(target, random) &&
         gru_steps_are_right(target, random) && lstm_steps_are_right(target, random) && float_panels_are_right(target, random) &&
         softmaxes_are_right(target, random);
}

}  // namespace requant
