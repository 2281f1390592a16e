// Attention: y = softmax(scale * q k' + mask) v by head, in integers with ranges that are found at run time (see target.h).
//
// Inputs: q (batch, heads, queries, depth), k (batch, heads, keys, depth), v (batch, heads, keys, width), mask. The mask may be
// missing; it is added as ONNX adds tensors. All repeat along batch and heads where they have length 1. The attribute
// `rows_first` has a 1 for each of q, k, v and y that is (batch, rows, heads, ...). Without heads tensors have three axes.
#include <algorithm>
#include <array>

#include "operators.h"
#include "target.h"

namespace requant {
namespace {

constexpr Requirement require{"ai.requant.Attention"};

// The floats of a tensor by batch, head, row and column.
struct View {
  float* data;
  std::array<int64_t, 4> shape, step;

  View(const std::vector<int64_t>& given, void* from, bool heads, bool rows_first = false)
      : data(static_cast<float*>(from)), shape{1, 1, 1, 1} {
    std::copy(given.begin(), given.end(), shape.end() - static_cast<int64_t>(given.size()));
    if (!heads) std::swap(shape[0], shape[1]);
    if (rows_first) std::swap(shape[1], shape[2]);
    step = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
    if (rows_first) step[1] = shape[3], step[2] = shape[1] * shape[3];
  }

  int64_t row_step() const { return shape[2] > 1 ? step[2] : 0; }  // a single row repeats

  float* at(int64_t batch, int64_t head) const {
    return data + (shape[0] > 1 ? batch * step[0] : 0) + (shape[1] > 1 ? head * step[1] : 0);
  }
};

class AttentionKernel {
 public:
  explicit AttentionKernel(const ort::Node& node)
      : target_(chosen()),
        count_(node.count()),
        scale_(node.real_attribute("scale", 1.0f)),
        rows_first_(node.attributes("rows_first", {0, 0, 0, 0})) {
    require(rows_first_.size() == 4, "rows_first must have four numbers");
  }

  void run(const ort::Run& run) const {
    const ort::Tensor given[] = {run.input(0), run.input(1), run.input(2)};
    const bool heads = given[0].shape.size() == 4;
    for (const ort::Tensor& each : given)
      require(each.shape.size() == (heads ? 4 : 3), "q, k and v must all have three or four axes");
    const ort::Tensor masking = count_ > kMask ? run.input(kMask) : ort::Tensor{};
    require(masking.shape.size() <= given[0].shape.size(), "the mask has too many axes");
    const auto view = [&](int index) { return View(given[index].shape, given[index].data, heads, rows_first_[index] != 0); };
    const View q = view(0), k = view(1), v = view(2), mask(masking.shape, masking.data, heads);
    const std::array<int64_t, 4> shape = result_of(q, k, v, mask);
    std::vector<int64_t> written(shape.begin(), shape.end());
    if (rows_first_[3]) std::swap(written[1], written[2]);
    if (!heads) written.erase(written.begin() + (rows_first_[3] ? 2 : 1));
    const View y(written, run.output(written), heads, rows_first_[3] != 0);
    const AttentionSize size{shape[2], k.shape[2], q.shape[3], v.shape[3], scale_};
    const int64_t results = shape[0] * shape[1] * shape[2] * shape[3];
    if (size.keys == 0) std::fill_n(y.data, results, 0.0f);
    if (results == 0 || size.keys == 0) return;
    require(size.keys <= kMostKeys && size.depth <= kMostKeys, "there are too many keys");
    run.parallel(static_cast<size_t>(shape[0] * shape[1]), [&](size_t index) {
      const int64_t batch = static_cast<int64_t>(index) / shape[1], head = static_cast<int64_t>(index) % shape[1];
      target_.attend(size, {.q = q.at(batch, head),
                            .k = k.at(batch, head),
                            .v = v.at(batch, head),
                            .mask = masking ? mask.at(batch, head) : nullptr,
                            .y = y.at(batch, head),
                            .q_step = q.row_step(),
                            .k_step = k.step[2],
                            .v_step = v.step[2],
                            .mask_step = mask.row_step(),
                            .y_step = y.step[2],
                            .mask_repeats = mask.shape[3] == 1});
    });
  }

 private:
  static constexpr size_t kMask = 3;                            // among the inputs
  static constexpr int64_t kMostKeys = INT32_MAX / (255 * 128);  // int32 holds all sums

  // Returns the shape of the result, with the heads before the rows.
  static std::array<int64_t, 4> result_of(const View& q, const View& k, const View& v, const View& mask) {
    require(q.shape[3] == k.shape[3] && k.shape[2] == v.shape[2], "the shapes do not fit together");
    require(mask.shape[3] == 1 || mask.shape[3] == k.shape[2], "the mask must have a column for each key, or one column");
    const auto shared = [&](int axis) { return common({q.shape[axis], k.shape[axis], v.shape[axis], mask.shape[axis]}); };
    return {shared(0), shared(1), common({q.shape[2], mask.shape[2]}), v.shape[3]};
  }

  // Returns the length that tensors share, of which some may have length 1.
  static int64_t common(std::initializer_list<int64_t> lengths) {
    int64_t found = 1;
    for (int64_t length : lengths) {
      require(length == 1 || found == 1 || length == found, "the shapes do not fit together");
      if (length != 1) found = length;
    }
    return found;
  }

  const Target& target_;
  size_t count_;  // of the node's inputs
  float scale_;
  std::vector<int64_t> rows_first_;
};

}  // namespace

std::vector<ort::CustomOp*> attention_operators() {
  using enum ort::ElementType;
  return named<AttentionKernel>("Attention", {kFloat, kFloat, kFloat, kFloat}, 3, kFloat);
}

}  // namespace requant
