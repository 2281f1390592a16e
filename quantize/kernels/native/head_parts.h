// Parts of a head of attention: neighbouring queries, and the keys that they may see. All other keys are not read for them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "aligned.h"
#include "target.h"

namespace requant {

// Queries from the first one on, and the keys behind the hidden ones.
struct HeadPart {
  int64_t first, queries, hidden, keys;
};

constexpr int64_t kTogether = 128;      // queries of a part, at most
constexpr float kHiddenBelow = -1e30f;  // a key with such a mask has the share 0, if the query sees another one

// Returns rows of a cache as floats, in memory of `scratch`.
inline const float* floats_of(const Cached& cached, int64_t rows, int64_t columns, Scratch& scratch) {
  float* const made = scratch.floats(rows * columns);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = row * columns; i < (row + 1) * columns; ++i)
      made[i] = cached.steps[row] * static_cast<float>(cached.bytes[i] - kCacheZero);
  return made;
}

// Computes a part of a head. More than a few queries pay for keys and values of a cache as floats.
inline void attend(const Target& target, AttentionSize size, Head head, const HeadPart& part) {
  head.q += part.first * head.q_step;
  head.y += part.first * head.y_step;
  if (part.keys <= 0) {  // the window of each query begins behind the last key
    const float blind = size.unseen_is_zero ? 0 : NAN;
    for (int64_t row = 0; row < part.queries; ++row) std::fill_n(head.y + row * head.y_step, size.width, blind);
    return;
  }
  if (head.mask != nullptr) head.mask += part.first * head.mask_step + (head.mask_repeats ? 0 : part.hidden);
  if (head.window != nullptr) head.window += part.first * head.window_step + part.hidden;
  size.queries = part.queries;
  size.keys = part.keys;
  size.first_seen += part.first - part.hidden;
  if (head.k != nullptr) {
    head.k += part.hidden * head.k_step;
    head.v += part.hidden * head.v_step;
  } else {
    head.k_cache = head.k_cache.behind(part.hidden, size.depth);
    head.v_cache = head.v_cache.behind(part.hidden, size.width);
  }
  if (size.queries <= kFewQueries) return target.vectors.attend_few(size, head);
  if (head.k == nullptr) {
    thread_local Scratch scratch[2];
    head.k = floats_of(head.k_cache, size.keys, size.depth, scratch[0]);
    head.v = floats_of(head.v_cache, size.keys, size.width, scratch[1]);
    head.k_step = size.depth;
    head.v_step = size.width;
  }
  target.attend(target.vectors, size, head);
}

// Calls `work` with the first query of each part, and the number of its queries: at most `most`, and about the same for all.
template <class Work>
void for_each_part(int64_t queries, int64_t most, const Work& work) {
  const int64_t rows = divided(queries, divided(queries, most));
  for (int64_t first = 0; first < queries; first += rows) work(first, std::min(rows, queries - first));
}

// Returns the parts of a head whose mask shows each query only some neighbouring keys, as a local window does; one part if they
// would leave out less than a quarter of what one part reads, or if a query sees no key: its result depends on all of them.
// The mask has a value for each query and key; `step` is the number of floats from one query to the next.
inline std::vector<HeadPart> parts_of(const AttentionSize& size, const float* mask, int64_t step) {
  const std::vector<HeadPart> whole{{0, size.queries, 0, size.keys}};
  const auto hides = [&](int64_t query, int64_t key) { return mask[query * step + key] <= kHiddenBelow; };
  if (size.queries < 2 * kTogether || !hides(size.queries - 1, 0)) return whole;  // most masks
  std::vector<HeadPart> parts;
  int64_t seen = 0, read = 0;
  bool blind = false;
  for_each_part(size.queries, kTogether, [&](int64_t first, int64_t queries) {
    int64_t least = size.keys, most = 0;
    for (int64_t query = first; query < first + queries; ++query) {
      int64_t begin = 0, end = size.seen_by(query);
      while (begin < end && hides(query, begin)) ++begin;
      while (begin < end && hides(query, end - 1)) --end;
      blind |= begin == end;
      least = std::min(least, begin);
      most = std::max(most, end);
    }
    parts.push_back({first, queries, least, most - least});
    seen += most * queries;
    read += (most - least) * queries;
  });
  return !blind && 4 * read <= 3 * seen ? parts : whole;
}

}  // namespace requant
