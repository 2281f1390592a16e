// The custom operators of the domain ai.requant.
#pragma once

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "function_ref.h"
#include "ort.h"

namespace requant {

// Each returns an operator under several names: NAME, NAME_2, NAME_3, ... A model has a function for each kind of body, and
// a function is known by its name.
std::vector<ort::CustomOp*> table_operators();
std::vector<ort::CustomOp*> convolution_operators();
std::vector<ort::CustomOp*> conv_transpose_operators();
std::vector<ort::CustomOp*> maximum_operators();
std::vector<ort::CustomOp*> mean_operators();
std::vector<ort::CustomOp*> global_mean_operators();
std::vector<ort::CustomOp*> concat_operators();
std::vector<ort::CustomOp*> sum_operators();
std::vector<ort::CustomOp*> product_operators();
std::vector<ort::CustomOp*> matmul_operators();
std::vector<ort::CustomOp*> matmul_nbits_operators();
std::vector<ort::CustomOp*> rotary_operators();
std::vector<ort::CustomOp*> quantize_operators();
std::vector<ort::CustomOp*> resize_operators();
std::vector<ort::CustomOp*> softmax_operators();
std::vector<ort::CustomOp*> dequantize_softmax_operators();
std::vector<ort::CustomOp*> lines_operators();
std::vector<ort::CustomOp*> depth_to_space_operators();
std::vector<ort::CustomOp*> group_normalization_operators();
std::vector<ort::CustomOp*> gru_operators();
std::vector<ort::CustomOp*> lstm_operators();
std::vector<ort::CustomOp*> attention_operators();
std::vector<ort::CustomOp*> window_attention_operators();
std::vector<ort::CustomOp*> cached_attention_operators();
std::vector<ort::CustomOp*> quantized_cache_attention_operators();
std::vector<ort::CustomOp*> normalization_operators();

// Ends a kernel with a message if a condition does not hold.
struct Requirement {
  const char* who;

  void operator()(bool condition, const char* message) const {
    if (!condition) throw ort::Failure(std::string(who) + ": " + message);
  }
};

// Returns a scale, or a ratio of scales. Rounding the results of another number than a positive one would be undefined.
inline float positive(float value) {
  if (!(value > 0 && std::isfinite(value)))
    throw ort::Failure("ai.requant: scales and their ratios must be positive numbers");
  return value;
}

// Returns an input that is a constant of one value: a scale or a zero point.
template <class T>
T one(const Requirement& require, const ort::Node& node, size_t index) {
  const ort::Tensor tensor = node.constant(index);
  require(tensor && tensor.size() == 1, "scales and zero points must be constants of one value");
  return tensor.as<T>()[0];
}

// Returns an attribute that is a uint8.
inline int byte_attribute(const Requirement& require, const ort::Node& node, const char* name, int64_t otherwise) {
  const int64_t value = node.attribute(name, otherwise);
  require(value >= 0 && value <= 255, "bend, least and most must be uint8");
  return static_cast<int>(value);
}

// Returns how many values of neighbouring pixels fill whole vectors of bytes; if these are too many, the channels of one pixel.
inline int64_t filling(int64_t channels) {
  constexpr int64_t kWidest = 64, kLongest = 1 << 12;
  const int64_t values = std::lcm(channels, kWidest);
  return values <= kLongest ? values : channels;
}

// Returns under how many names the library has an operator. A session takes 0.04 ms for each name.
inline int count_of_names(const std::string& operation) {
  if (operation == "Convolution") return 12;
  if (operation == "MatMul") return 8;
  return operation == "Table" ? 6 : 4;
}

// Does some work; no exception may pass through the runtime, so that one becomes a status.
ort::Status* guarded(FunctionRef<void()> work);

// Returns the name of an element type.
inline const char* name_of(ort::ElementType type) {
  switch (type) {
    case ort::kFloat: return "float";
    case ort::kUint8: return "uint8";
    case ort::kInt8: return "int8";
    case ort::kInt16: return "int16";
    case ort::kInt32: return "int32";
    case ort::kBool: return "bool";
    case ort::kAny: break;
  }
  return "any";
}

// The version of the domain. Nodes of another one are computed by the bodies of their functions. Those of 1 had inputs without
// names.
constexpr int kVersion = 2;

// What the runtime asks of any operator. No kernel is known here, so that all operators share this code.
//
//   name: its name
//   inputs: the element types, kAny for more than one; those from `required` on may be omitted. Further inputs are constants of
//     the body.
//   outputs: the element types of the results
//
// The runtime is told the first input alone, and that more follow: each session copies what it knows of each input of each
// name several times, and this takes most of the time of a small session. `check` looks at the other inputs.
class Signature : public ort::CustomOp {
 public:
  Signature(std::string name, std::vector<ort::ElementType> inputs, size_t required, std::vector<ort::ElementType> outputs)
      : name_(std::move(name)), inputs_(std::move(inputs)), required_(required), outputs_(std::move(outputs)) {
    CustomOp::name = [](const CustomOp* op) { return of(op).name_.c_str(); };
    provider = [](const CustomOp*) { return "CPUExecutionProvider"; };
    input_type = [](const CustomOp* op, size_t index) { return index == 0 ? of(op).inputs_[0] : ort::kAny; };
    input_count = [](const CustomOp*) { return size_t{2}; };
    output_type = [](const CustomOp* op, size_t index) { return of(op).outputs_[index]; };
    output_count = [](const CustomOp* op) { return of(op).outputs_.size(); };
    input_characteristic = [](const CustomOp*, size_t index) -> int { return index == 0 ? ort::kRequired : ort::kVariadic; };
    output_characteristic = [](const CustomOp*, size_t) { return 0; };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    for (auto& each : variadic) each = [](const CustomOp*) { return 0; };  // any number, of any types
    start_version = [](const CustomOp*) { return kVersion; };
    end_version = [](const CustomOp*) { return 0x7fffffff; };
  }

  static const Signature& of(const CustomOp* op) { return *static_cast<const Signature*>(op); }

  // Refuses a node that lacks an input, or has one of another element type.
  void check(const ort::Node& node) const {
    for (size_t index = 0; index < inputs_.size(); ++index) {
      const ort::ElementType type = node.type(index);
      if (type == inputs_[index] || (type == ort::kAny ? index >= required_ : inputs_[index] == ort::kAny)) continue;
      throw ort::Failure(name_ + ": input " + std::to_string(index) + " must be a tensor of " + name_of(inputs_[index]));
    }
  }

 private:
  std::string name_;
  std::vector<ort::ElementType> inputs_;
  size_t required_;
  std::vector<ort::ElementType> outputs_;
};

// Completes an operator whose kernel is a class with a constructor from a Node and run(Run).
template <class Kernel>
void complete(ort::CustomOp& op) {
  op.create_kernel_v2 = [](const ort::CustomOp* op, const void*, const ort::KernelInfo* info, void** kernel) {
    return guarded([&] {
      const ort::Node node(info);
      Signature::of(op).check(node);
      *kernel = new Kernel(node);
    });
  };
  op.compute_v2 = [](void* kernel, ort::KernelContext* context) {
    return guarded([&] { static_cast<const Kernel*>(kernel)->run(ort::Run(context)); });
  };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

// Returns an operator under all its names, each completed by `finish`. They live as long as the library.
inline std::vector<ort::CustomOp*> named(const char* name, const std::vector<ort::ElementType>& inputs, size_t required,
                                         const std::vector<ort::ElementType>& outputs, void (*finish)(ort::CustomOp&)) {
  std::vector<ort::CustomOp*> made;
  for (int i = 1; i <= count_of_names(name); ++i) {
    const std::string whole = i == 1 ? name : std::string(name) + "_" + std::to_string(i);
    made.push_back(new Signature(whole, inputs, required, outputs));
    finish(*made.back());
  }
  return made;
}

template <class Kernel>
std::vector<ort::CustomOp*> named(const char* name, const std::vector<ort::ElementType>& inputs, size_t required,
                                  const std::vector<ort::ElementType>& outputs = {ort::kUint8}) {
  return named(name, inputs, required, outputs, complete<Kernel>);
}

}  // namespace requant
