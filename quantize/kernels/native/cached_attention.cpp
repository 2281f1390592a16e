// CachedAttention: y = softmax(scale * q k' + mask) v by head, where the keys and values of earlier runs come before those of
// this run, and go out with them; integers as in Attention.
//
// Inputs: q (batch, queries, heads * depth), k (batch, rows, shared * depth), v (batch, rows, shared * width), mask, past
// k (batch, shared, room, depth), past v (batch, shared, room, width), lengths, total, cos and sin (places, angles), and
// sinks (heads). All but q may be missing. Without k and v, they stand in q behind the queries. q, k and v may also be
// (batch, heads, rows, ...). The mask is added to the scores and repeats along all axes of (batch, heads, queries, total) but the
// last one. Results: y (batch, queries, heads * width) or (batch, heads, queries, width), as q has it; k and v (batch, shared,
// keys, ...).
//
// lengths has for each item the number of its keys, less one, and total is the number of keys of the longest item: if that is
// the number of queries, no item has keys of earlier runs. keys is the larger one of total and room. Rows behind the keys of an
// item are 0, or keep their values if past and result are the same memory. Without lengths and total, all rows of the past are
// keys of earlier runs, and there may be more or fewer new keys than queries.
//
// With cos and sin, the first 2 * angles values of each row of q and of the new k are turned: pairs that are `angles` apart, or
// neighbours if the attribute `interleaved` is 1. Each query sees the keys up to its own, or all if `causal` is 0; with `window`,
// so many of them at most. With `cap` scores become cap * tanh(score / cap) before the mask. A sink is one more score of each
// query, whose share of the softmax has no value; with `smooth` 1 the sinks are 0. A query whose mask is -infinity for all keys
// is 0, or NaN if `zero` is 0.
//
// QuantizedCacheAttention is the same with caches in bytes: past k and past v are uint8, 128 more than integers from -127 to 127,
// and the inputs behind the sinks are the step of each row, (batch, shared, room, 1). So are the results: y, k, v, and the steps
// of k and v. All keys and values are rounded before they are read, those of this run too.
#include <algorithm>
#include <array>
#include <cmath>

#include "aligned.h"
#include "cache.h"
#include "head_parts.h"
#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.CachedAttention"};

// How many of everything.
struct Sizes {
  int64_t batch, queries, fresh, depth, width;  // fresh: new keys
  int64_t room, keys;  // rows of the past and of the results
  int64_t total;       // of the longest item, keys of earlier runs and new ones
  bool heads_apart;    // whether q, k, v and y have an axis for heads
};

class CachedAttentionKernel {
 public:
  // A cache holds floats, or bytes if it is `rounded`.
  CachedAttentionKernel(const ort::Node& node, bool rounded)
      : target_(chosen()),
        rounded_(rounded),
        count_(node.count()),
        heads_(node.attribute("heads", 0)),
        shared_(node.attribute("shared", 0)),
        scale_(node.real_attribute("scale", 0.0f)),
        interleaved_(node.attribute("interleaved", 0) != 0),
        causal_(node.attribute("causal", 1) != 0),
        unseen_is_zero_(node.attribute("zero", 1) != 0),
        window_(std::min<int64_t>(node.attribute("window", 0), INT32_MAX)),  // a longer one hides no key either
        cap_(node.real_attribute("cap", 0)),
        sink_(node.attribute("smooth", 0) != 0 ? 0 : -INFINITY) {
    require(heads_ > 0 && shared_ > 0 && heads_ <= INT32_MAX && heads_ % shared_ == 0, "heads must be a multiple of shared");
    require(window_ >= 0 && (window_ == 0 || causal_), "a window must not be negative, and needs an order");
    require(cap_ >= 0 && std::isfinite(cap_), "a cap must not be negative");
  }

  void run(const ort::Run& run) const {
    std::array<ort::Tensor, kInputs> given;
    for (size_t i = 0; i < std::min<size_t>(count_, kInputs); ++i) given[i] = run.input(i);
    const Sizes sizes = sizes_of(given);
    const std::vector<int64_t> before = before_in(given, sizes);
    View q = queries_in(given[kQ], sizes), mask = mask_in(given[kMask], sizes);
    const Angles angles = angles_in(given, sizes, before);
    const auto [batch, queries, fresh, depth, width, room, keys, total, heads_apart] = sizes;
    const View fresh_k = new_k(given, sizes), fresh_v = new_v(given, sizes);
    const Cache past_k = past_in(given, kPastK, sizes, depth), past_v = past_in(given, kPastV, sizes, width);
    const std::vector<int64_t> shape =
        heads_apart ? std::vector{batch, heads_, queries, width} : std::vector{batch, queries, heads_ * width};
    float* const results = result(run, shape, 0);
    View y = heads_apart ? with_heads(results, heads_, queries, width)
                         : side_by_side(results, 0, queries, heads_ * width, width);
    const Cache k = cache_of(run, sizes, depth, 1), v = cache_of(run, sizes, width, 2);
    run.parallel(static_cast<size_t>(batch * shared_), [&](size_t index) {
      const int64_t item = static_cast<int64_t>(index) / shared_, head = static_cast<int64_t>(index) % shared_;
      k.take(past_k, {item, head, before[item], fresh, fresh_k}, angles, target_.vectors);
      v.take(past_v, {item, head, before[item], fresh, fresh_v}, {}, target_.vectors);
    });
    if (total == 0) std::fill_n(results, batch * heads_ * queries * width, 0.0f);
    if (queries == 0 || total == 0) return;
    const float scale = scale_ != 0 ? scale_ : 1 / std::sqrt(static_cast<float>(depth));
    // heads of one query each that share keys are computed together, if they see the same ones
    const bool sees_all = !causal_ || fresh == 1, grouped = shared_ < heads_;
    const bool together = queries == 1 && grouped && sees_all && window_ == 0 && !given[kSinks];
    const int64_t group = together ? heads_ / shared_ : 1, count = heads_ / group;
    if (together) q = q.grouped(group), y = y.grouped(group), mask = mask.grouped(group);
    run.parallel(static_cast<size_t>(batch * count), [&](size_t index) {
      const int64_t item = static_cast<int64_t>(index) / count, head = static_cast<int64_t>(index) % count;
      const int64_t of = head * shared_ / count, seen = before[item];
      const int64_t all = seen + fresh;
      AttentionSize size{queries * group, all, depth, width, scale, causal_ && !together ? seen + 1 : all, unseen_is_zero_};
      if (window_ > 0) size.window = window_;
      size.cap = cap_;
      const View turned = turned_queries(q.at(item, head), q.row, {seen, together ? 0 : 1}, size, angles);
      const Head one{.q = turned.data,
                     .k = rounded_ ? nullptr : k.floats_of(item, of),
                     .v = rounded_ ? nullptr : v.floats_of(item, of),
                     .mask = mask.data == nullptr ? nullptr : mask.at(item, head),
                     .y = y.at(item, head),
                     .q_step = turned.row,
                     .k_step = depth,
                     .v_step = width,
                     .mask_step = mask.row,
                     .y_step = y.row,
                     .mask_repeats = false,
                     .sink = given[kSinks] ? given[kSinks].as<float>()[head] : sink_,
                     .k_cache = rounded_ ? k.cached(item, of) : Cached{},
                     .v_cache = rounded_ ? v.cached(item, of) : Cached{}};
      if (together) return target_.vectors.attend_few(size, one);
      for_each_part(queries, std::max(window_, kTogether), [&](int64_t first, int64_t rows) {
        const int64_t hidden = size.hidden_before(first);
        const HeadPart part{first, rows, hidden, size.seen_by(first + rows - 1) - hidden};
        attend(target_, size, one, part);
      });
    });
  }

 private:
  enum Input : size_t { kQ, kK, kV, kMask, kPastK, kPastV, kLengths, kTotal, kCos, kSin, kSinks, kStepsK, kStepsV, kInputs };

  // The place of the first query among all rows, and how far the next one is from it.
  struct Places {
    int64_t first, step;
  };

  using Given = std::array<ort::Tensor, kInputs>;

  static float* result(const ort::Run& run, const std::vector<int64_t>& shape, size_t index) {
    return reinterpret_cast<float*>(run.output(shape, index));
  }

  // Returns the memory of a result; the steps of its rows are a result two places behind it.
  Cache cache_of(const ort::Run& run, const Sizes& sizes, int64_t columns, size_t index) const {
    Cache made{.heads = shared_, .rows = sizes.keys, .columns = columns};
    uint8_t* const values = run.output({sizes.batch, shared_, sizes.keys, columns}, index);
    if (!rounded_) {
      made.floats = reinterpret_cast<float*>(values);
      return made;
    }
    made.bytes = values;
    made.steps = result(run, {sizes.batch, shared_, sizes.keys, 1}, index + 2);
    return made;
  }

  static float* floats(const ort::Tensor& tensor) { return static_cast<float*>(tensor.data); }

  Sizes sizes_of(const Given& given) const {
    Sizes sizes = given[kQ].shape.size() == 4 ? sizes_with_heads(given) : sizes_side_by_side(given);
    require(bool(given[kPastK]) == bool(given[kPastV]), "past k and v belong together");
    if (given[kPastK]) {
      require(given[kPastK].shape.size() == 4, "past k must have four axes");
      sizes.room = given[kPastK].shape[2];
      require(given[kPastK].shape == std::vector{sizes.batch, shared_, sizes.room, sizes.depth}, "past k must fit to k");
      require(given[kPastV].shape == std::vector{sizes.batch, shared_, sizes.room, sizes.width}, "past v must fit to v");
    }
    require(bool(given[kLengths]) == bool(given[kTotal]), "lengths and total belong together");
    require(!given[kTotal] || sizes.fresh == sizes.queries, "with lengths there must be a key for each query");
    require(!given[kTotal] || given[kTotal].size() == 1, "total must be one number");
    sizes.total = given[kTotal] ? int64_t{given[kTotal].as<int32_t>()[0]} : sizes.room + sizes.fresh;
    sizes.keys = std::max(sizes.total, sizes.room);
    require(!given[kSinks] || given[kSinks].size() == heads_, "there must be a sink for each head");
    require(sizes.keys <= kDeepest || sizes.queries <= kFewQueries, "there are too many keys");
    require(sizes.depth <= kDeepest, "the rows are too long");
    return sizes;
  }

  // Returns the batch, the queries and the widths of heads, which stand side by side in the last axis.
  Sizes sizes_side_by_side(const Given& given) const {
    const std::vector<int64_t>& shape = given[kQ].shape;
    const bool apart = bool(given[kK]);
    require(shape.size() == 3 && apart == bool(given[kV]), "q must have three or four axes, and k and v belong together");
    const int64_t all = apart ? heads_ : heads_ + 2 * shared_, depth = shape[2] / all;
    require(depth > 0 && shape[2] % all == 0, "the heads must have the same width");
    Sizes sizes{shape[0], shape[1], shape[1], depth, depth, 0, 0, 0, false};
    if (!apart) return sizes;
    const std::vector<int64_t>&k = given[kK].shape, &v = given[kV].shape;
    require(k.size() == 3 && k[0] == shape[0] && k[2] == shared_ * depth, "k must have the depth of q");
    require(v.size() == 3 && v[0] == shape[0] && v[1] == k[1] && v[2] > 0 && v[2] % shared_ == 0, "v must fit to k");
    sizes.fresh = k[1];
    sizes.width = v[2] / shared_;
    return sizes;
  }

  // The same of tensors with an axis for heads.
  Sizes sizes_with_heads(const Given& given) const {
    const std::vector<int64_t>&q = given[kQ].shape, &k = given[kK].shape, &v = given[kV].shape;
    require(k.size() == 4 && k == std::vector{q[0], shared_, k[2], q[3]}, "k must have the depth of q");
    require(v.size() == 4 && v[3] > 0 && v == std::vector{q[0], shared_, k[2], v[3]}, "v must fit to k");
    require(q[1] == heads_ && q[3] > 0, "q must have its heads");
    return {q[0], q[2], k[2], q[3], v[3], 0, 0, 0, true};
  }

  // Returns how many keys of earlier runs each item has.
  static std::vector<int64_t> before_in(const Given& given, const Sizes& sizes) {
    std::vector<int64_t> before(static_cast<size_t>(sizes.batch), sizes.room);
    if (!given[kLengths]) return before;
    require(given[kLengths].size() == sizes.batch, "lengths must have a number for each item");
    const bool first = sizes.total == sizes.queries;
    for (int64_t i = 0; i < sizes.batch; ++i) {
      before[i] = first ? 0 : int64_t{given[kLengths].as<int32_t>()[i]} + 1 - sizes.queries;
      const bool fits = before[i] >= 0 && before[i] <= sizes.room && before[i] + sizes.queries <= sizes.total;
      require(fits, "lengths must fit to the past");
    }
    return before;
  }

  View queries_in(const ort::Tensor& q, const Sizes& sizes) const {
    return sizes.heads_apart ? with_heads(floats(q), heads_, sizes.queries, sizes.depth)
                             : side_by_side(floats(q), 0, sizes.queries, q.shape[2], sizes.depth);
  }

  View new_k(const Given& given, const Sizes& sizes) const {
    const ort::Tensor& from = given[given[kK] ? kK : kQ];
    if (sizes.heads_apart) return with_heads(floats(from), shared_, sizes.fresh, sizes.depth);
    return side_by_side(floats(from), given[kK] ? 0 : heads_ * sizes.depth, sizes.fresh, from.shape[2], sizes.depth);
  }

  View new_v(const Given& given, const Sizes& sizes) const {
    const ort::Tensor& from = given[given[kV] ? kV : kQ];
    if (sizes.heads_apart) return with_heads(floats(from), shared_, sizes.fresh, sizes.width);
    const int64_t first = given[kV] ? 0 : (heads_ + shared_) * sizes.depth;
    return side_by_side(floats(from), first, sizes.fresh, from.shape[2], sizes.width);
  }

  Cache past_in(const Given& given, Input index, const Sizes& sizes, int64_t columns) const {
    const ort::Tensor &past = given[index], &steps = given[index == kPastK ? kStepsK : kStepsV];
    Cache made{.heads = shared_, .rows = sizes.room, .columns = columns};
    if (rounded_ && past) {
      const std::vector<int64_t> shape{sizes.batch, shared_, sizes.room, 1};
      require(steps && steps.shape == shape, "each row of the past must have a step");
      made.bytes = static_cast<uint8_t*>(past.data);
      made.steps = floats(steps);
    } else if (past) {
      made.floats = floats(past);
    }
    return made;
  }

  View mask_in(const ort::Tensor& mask, const Sizes& sizes) const {
    if (!mask) return {};
    std::vector<int64_t> shape = mask.shape;
    require(shape.size() >= 1 && shape.size() <= 4, "the mask must have one to four axes");
    shape.insert(shape.begin(), 4 - shape.size(), 1);
    const int64_t whole[] = {sizes.batch, heads_, sizes.queries, sizes.total};
    for (int axis = 0; axis < 4; ++axis)
      require(shape[axis] == whole[axis] || (axis < 3 && shape[axis] == 1), "the mask must fit to the scores");
    const View view = with_heads(floats(mask), shape[1], shape[2], shape[3]);
    return {view.data, shape[0] > 1 ? view.item : 0, shape[1] > 1 ? view.head : 0, shape[2] > 1 ? view.row : 0};
  }

  Angles angles_in(const Given& given, const Sizes& sizes, const std::vector<int64_t>& before) const {
    const ort::Tensor &cos = given[kCos], &sin = given[kSin];
    require(bool(cos) == bool(sin), "cos and sin belong together");
    if (!cos) return {};
    require(cos.shape.size() == 2 && cos.shape == sin.shape, "cos and sin must have two axes, and the same shape");
    require(2 * cos.shape[1] <= sizes.depth, "there are more angles than pairs");
    const int64_t rows = std::max(sizes.queries, sizes.fresh);
    for (int64_t each : before) require(each + rows <= cos.shape[0], "there are more places than cosines");
    return {cos.as<float>(), sin.as<float>(), cos.shape[1], interleaved_};
  }

  // Returns the rows of a head, `step` apart, turned if there are angles.
  static View turned_queries(float* from, int64_t step, const Places& places, const AttentionSize& size, const Angles& angles) {
    if (angles.count == 0) return {from, 0, 0, step};
    thread_local Scratch scratch;  // its memory grows to the largest head
    float* const to = scratch.floats(size.queries * size.depth);
    for (int64_t row = 0; row < size.queries; ++row)
      angles.turn(from + row * step, places.first + row * places.step, size.depth, to + row * size.depth);
    return {to, 0, 0, size.depth};
  }

  const Target& target_;
  bool rounded_;
  size_t count_;  // of the node's inputs
  int64_t heads_, shared_;  // of q, and of k and v
  float scale_;
  bool interleaved_, causal_, unseen_is_zero_;
  int64_t window_;  // 0 without one
  float cap_, sink_;
};

struct WithFloats : CachedAttentionKernel {
  explicit WithFloats(const ort::Node& node) : CachedAttentionKernel(node, false) {}
};

struct WithBytes : CachedAttentionKernel {
  explicit WithBytes(const ort::Node& node) : CachedAttentionKernel(node, true) {}
};

}  // namespace

std::vector<ort::CustomOp*> cached_attention_operators() {
  using enum ort::ElementType;
  return named<WithFloats>(
      "CachedAttention", {kFloat, kFloat, kFloat, kFloat, kFloat, kFloat, kInt32, kInt32, kFloat, kFloat, kFloat}, 1,
      {kFloat, kFloat, kFloat});
}

std::vector<ort::CustomOp*> quantized_cache_attention_operators() {
  using enum ort::ElementType;
  return named<WithBytes>(
      "QuantizedCacheAttention",
      {kFloat, kFloat, kFloat, kFloat, kUint8, kUint8, kInt32, kInt32, kFloat, kFloat, kFloat, kFloat, kFloat}, 1,
      {kFloat, kUint8, kUint8, kFloat, kFloat});
}

}  // namespace requant
