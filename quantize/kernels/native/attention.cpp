// Attention: y = softmax(scale * q k' + mask) v by head, in integers with ranges that are found at run time; few queries in float
// (see target.h).
//
// Inputs: q (batch, heads, queries, depth), k (batch, heads, keys, depth), v (batch, heads, keys, width), mask. The mask may be
// missing; it is added as ONNX adds tensors. All repeat along the batch where they have length 1. A tensor may have fewer heads
// than the result: then each of its heads serves equally many neighbouring heads. The attribute `orders` tells the axes of q, k,
// v and y in memory: 0 as above, 1 (batch, rows, heads, ...), 2 (rows, batch, heads, ...).
// Without heads tensors have three axes, (batch, rows, columns), and all orders are 0.
//
// If the attribute `heads` is not 0, the heads of q, k and v stand side by side in the last axis of tensors with three axes:
// (batch, rows, columns) or (rows, batch, columns). Head h of each is the columns from first + h * step on; `columns` tells how
// many there are of q and k, and of v. So the three may be parts of one tensor. k and v have `shared_heads` heads, or, if it is
// 0, as many as q. If `orders` is 3 for y, the heads of y stand side by side too, and y has three axes, (batch, rows, columns).
//
// If the attribute `causal` is 1, the first query sees the first key, and each query one key more than the query before it. With
// `cap` scores become cap * tanh(score / cap) before the mask. With `zero` a query whose mask is -infinity for all keys is 0;
// otherwise it is NaN, as a softmax is.
//
// WindowAttention is the same with a second mask behind the first one, (1, windows, 1, queries, keys); the attribute `windows`
// tells how many there are. It is added to the scores too, and repeats along the batch: item b gets that of window b % windows.
#include <algorithm>
#include <array>

#include "head_parts.h"
#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.Attention"};

// Where the heads are that stand side by side in the last axis of a tensor.
struct Columns {
  int64_t heads, first, step, count;
};

// The floats of a tensor by batch, head, row and column.
struct View {
  float* data;
  std::array<int64_t, 4> shape, step;

  // A tensor with an axis for heads, or without heads; `order` is its value of `orders`.
  View(const std::vector<int64_t>& given, void* from, bool heads, int64_t order = 0) : data(static_cast<float*>(from)) {
    std::array<int64_t, 4> lengths{1, 1, 1, 1};
    std::copy(given.begin(), given.end(), lengths.end() - static_cast<int64_t>(given.size()));
    if (!heads) std::swap(lengths[0], lengths[1]);
    constexpr int kPlaces[3][4] = {{0, 1, 2, 3}, {0, 2, 1, 3}, {1, 2, 0, 3}};  // of batch, head, row and column
    const std::array<int64_t, 4> steps{lengths[1] * lengths[2] * lengths[3], lengths[2] * lengths[3], lengths[3], 1};
    for (int axis = 0; axis < 4; ++axis) {
      shape[axis] = lengths[kPlaces[order][axis]];
      step[axis] = steps[kPlaces[order][axis]];
    }
  }

  // A tensor with three axes, and heads in the last one.
  View(const ort::Tensor& tensor, int64_t order, const Columns& columns)
      : data(static_cast<float*>(tensor.data) + columns.first) {
    const auto& [one, two, width] = std::array<int64_t, 3>{tensor.shape[0], tensor.shape[1], tensor.shape[2]};
    const bool rows_behind = order != 2;
    shape = {rows_behind ? one : two, columns.heads, rows_behind ? two : one, columns.count};
    step = {rows_behind ? two * width : width, columns.step, rows_behind ? width : two * width, 1};
  }

  int64_t row_step() const { return shape[2] > 1 ? step[2] : 0; }  // a single row repeats

  // Where a head of a result with `heads` heads begins.
  float* at(int64_t batch, int64_t head, int64_t heads) const {
    return data + (shape[0] > 1 ? batch * step[0] : 0) + head * shape[1] / heads * step[1];
  }
};

class AttentionKernel {
 public:
  explicit AttentionKernel(const ort::Node& node)
      : target_(chosen()),
        windows_(node.attribute("windows", 0)),
        count_(node.count()),
        scale_(node.real_attribute("scale", 1.0f)),
        orders_(node.attributes("orders", {0, 0, 0, 0})),
        heads_(node.attribute("heads", 0)),
        shared_heads_(node.attribute("shared_heads", 0)),
        causal_(node.attribute("causal", 0) != 0),
        unseen_is_zero_(node.attribute("zero", 0) != 0),
        first_(node.attributes("first", {0, 0, 0})),
        step_(node.attributes("step", {0, 0, 0})),
        columns_(node.attributes("columns", {0, 0})),
        cap_(node.real_attribute("cap", 0)) {
    require(cap_ >= 0 && std::isfinite(cap_), "a cap must not be negative");
    const bool described = windows_ > 0 && count_ > kWindows && node.type(kWindows) == ort::kFloat;
    require(windows_ == 0 || described, "windows must have a mask");
    require(orders_.size() == 4, "orders must have four numbers");
    for (size_t i = 0; i < 4; ++i) {
      const bool joined = i == 3 && heads_ > 0;
      require(orders_[i] >= 0 && orders_[i] <= (joined ? kJoined : 2), "orders must be 0, 1 or 2");
    }
    require(first_.size() == 3 && step_.size() == 3 && columns_.size() == 2, "the heads must be described");
    for (const auto& each : {first_, step_, columns_, {heads_, shared_heads_}})  // so small that no place of a column overflows
      for (int64_t number : each) require(number >= 0 && number <= INT32_MAX, "heads must be inside their tensor");
  }

  void run(const ort::Run& run) const {
    const ort::Tensor given[] = {run.input(0), run.input(1), run.input(2)};
    const bool heads = heads_ > 0 || given[0].shape.size() == 4;
    const size_t axes = heads_ == 0 && heads ? 4 : 3;
    for (int64_t order : orders_) require(heads || heads_ > 0 || order == 0, "without heads all orders must be 0");
    for (const ort::Tensor& each : given) require(each.shape.size() == axes, "q, k and v must all have three or four axes");
    const ort::Tensor masking = count_ > kMask ? run.input(kMask) : ort::Tensor{};
    require(masking.shape.size() <= (heads ? 4 : 3), "the mask has too many axes");
    const bool single = orders_[3] == kJoined && heads_ == 1 && masking.shape.size() < 4;  // the mask has no axis for heads
    const View q = view(given, 0), k = view(given, 1), v = view(given, 2), mask(masking.shape, masking.data, heads && !single);
    const std::array<int64_t, 4> shape = result_of(q, k, v, mask);
    const View y = result(run, shape, heads);
    const int64_t seen = causal_ ? 1 : k.shape[2];
    AttentionSize size{shape[2], k.shape[2], q.shape[3], v.shape[3], scale_, seen, unseen_is_zero_};
    size.cap = cap_;
    const int64_t results = shape[0] * shape[1] * shape[2] * shape[3];
    if (size.keys == 0) std::fill_n(y.data, results, 0.0f);
    if (results == 0 || size.keys == 0) return;
    const bool fits = size.keys <= kDeepest && size.depth <= kDeepest;
    require(fits || size.queries <= kFewQueries, "there are too many keys");
    const std::vector<std::vector<HeadPart>> parts = parts_by_mask(size, masking ? &mask : nullptr);
    const ort::Tensor second = windows_ > 0 ? run.input(kWindows) : ort::Tensor{};
    const int64_t of_window = size.queries * size.keys;
    require(!second || (shape[0] % windows_ == 0 && second.size() == windows_ * of_window), "windows must fit to the batch");
    run.parallel(static_cast<size_t>(shape[0] * shape[1]), [&](size_t index) {
      const int64_t all = shape[1], batch = static_cast<int64_t>(index) / all, head = static_cast<int64_t>(index) % all;
      const Head of{.q = q.at(batch, head, all),
                    .k = k.at(batch, head, all),
                    .v = v.at(batch, head, all),
                    .mask = masking ? mask.at(batch, head, all) : nullptr,
                    .y = y.at(batch, head, all),
                    .q_step = q.row_step(),
                    .k_step = k.step[2],
                    .v_step = v.step[2],
                    .mask_step = mask.row_step(),
                    .y_step = y.step[2],
                    .mask_repeats = mask.shape[3] == 1,
                    .window = second ? second.as<float>() + batch % windows_ * of_window : nullptr,
                    .window_step = size.keys};
      const int64_t plane = (mask.shape[0] > 1 ? batch * mask.shape[1] : 0) + head * mask.shape[1] / all;
      for (const HeadPart& part : parts[parts.size() > 1 ? plane : 0]) attend(target_, size, of, part);
    });
  }

 private:
  static constexpr size_t kMask = 3, kWindows = 4;  // among the inputs
  static constexpr int64_t kJoined = 3;  // of orders

  View view(const ort::Tensor (&given)[3], size_t index) const {
    const int64_t order = orders_[index];
    if (heads_ == 0) return View(given[index].shape, given[index].data, given[index].shape.size() == 4, order);
    const int64_t heads = index > 0 && shared_heads_ > 0 ? shared_heads_ : heads_;
    const Columns columns{heads, first_[index], step_[index], columns_[index == 2]};
    require(columns.first + (heads - 1) * columns.step + columns.count <= given[index].shape[2],
            "heads must be inside their tensor");
    return View(given[index], order, columns);
  }

  // Returns the parts of a head for each head of each item of the mask, or those of all heads.
  static std::vector<std::vector<HeadPart>> parts_by_mask(const AttentionSize& size, const View* mask) {
    const bool whole = mask != nullptr && mask->shape[2] == size.queries && mask->shape[3] == size.keys;
    if (!whole) return {{{0, size.queries, 0, size.keys}}};
    std::vector<std::vector<HeadPart>> parts;
    for (int64_t batch = 0; batch < mask->shape[0]; ++batch)
      for (int64_t head = 0; head < mask->shape[1]; ++head)
        parts.push_back(parts_of(size, mask->data + batch * mask->step[0] + head * mask->step[1], mask->step[2]));
    return parts;
  }

  // Makes the result, of this shape with the heads before the rows.
  View result(const ort::Run& run, const std::array<int64_t, 4>& shape, bool heads) const {
    const int64_t order = orders_[3];
    const auto [batch, head, rows, columns] = shape;
    if (heads && order == kJoined) {
      const std::vector written{batch, rows, head * columns};
      return View({written, run.output(written)}, 1, {head, 0, columns, columns});
    }
    const std::vector<int64_t> written = !heads      ? std::vector{batch, rows, columns}
                                         : order == 0 ? std::vector{batch, head, rows, columns}
                                         : order == 1 ? std::vector{batch, rows, head, columns}
                                                      : std::vector{rows, batch, head, columns};
    return View(written, run.output(written), heads, heads ? order : 0);
  }

  // Returns the shape of the result, with the heads before the rows.
  static std::array<int64_t, 4> result_of(const View& q, const View& k, const View& v, const View& mask) {
    require(q.shape[3] == k.shape[3] && k.shape[2] == v.shape[2], "the shapes do not fit together");
    require(mask.shape[3] == 1 || mask.shape[3] == k.shape[2], "the mask must have a column for each key, or one column");
    const auto shared = [&](int axis) { return std::vector{q.shape[axis], k.shape[axis], v.shape[axis], mask.shape[axis]}; };
    return {common(shared(0)), heads_of(shared(1)), common({q.shape[2], mask.shape[2]}), v.shape[3]};
  }

  // Returns how many heads the result has, for those of q, k, v and the mask.
  static int64_t heads_of(const std::vector<int64_t>& heads) {
    const auto [least, most] = std::minmax_element(heads.begin(), heads.end());
    if (*least == 0) return common(heads);
    for (int64_t each : heads) require(*most % each == 0, "the shapes do not fit together");
    return *most;
  }

  // Returns the length that tensors share, of which some may have length 1.
  static int64_t common(const std::vector<int64_t>& lengths) {
    int64_t found = 1;
    for (int64_t length : lengths) {
      require(length == 1 || found == 1 || length == found, "the shapes do not fit together");
      if (length != 1) found = length;
    }
    return found;
  }

  const Target& target_;
  int64_t windows_;  // 0 without a mask for each
  size_t count_;     // of the node's inputs
  float scale_;
  std::vector<int64_t> orders_;
  int64_t heads_, shared_heads_;  // that stand side by side, of q, and of k and v; 0 if tensors have an axis for them
  bool causal_, unseen_is_zero_;
  std::vector<int64_t> first_, step_, columns_;
  float cap_;
};

}  // namespace

std::vector<ort::CustomOp*> attention_operators() {
  using enum ort::ElementType;
  return named<AttentionKernel>("Attention", {kFloat, kFloat, kFloat, kFloat}, 3, {kFloat});
}

std::vector<ort::CustomOp*> window_attention_operators() {
  using enum ort::ElementType;
  return named<AttentionKernel>("WindowAttention", {kFloat, kFloat, kFloat, kFloat, kFloat}, 5, {kFloat});
}

}  // namespace requant
