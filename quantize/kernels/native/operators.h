// The custom operators of the domain ai.requant.
#pragma once

#include <vector>

#include "ort.h"

namespace requant {

ort::CustomOp* table_operator();
ort::CustomOp* convolution_operator();
ort::CustomOp* average_operator();
ort::CustomOp* maximum_operator();

// Completes an operator whose kernel is a class with a constructor from a Node and run(Run).
//
//   name: its name
//   inputs: the element types; those from `required` on are optional
template <class Kernel>
class Operator : public ort::CustomOp {
 public:
  Operator(const char* name, std::vector<ort::ElementType> inputs, size_t required)
      : name_(name), inputs_(std::move(inputs)), required_(required) {
    CustomOp::name = [](const CustomOp* op) { return self(op).name_; };
    provider = [](const CustomOp*) { return "CPUExecutionProvider"; };
    input_type = [](const CustomOp* op, size_t index) { return self(op).inputs_[index]; };
    input_count = [](const CustomOp* op) { return self(op).inputs_.size(); };
    output_type = [](const CustomOp*, size_t) { return ort::kUint8; };
    output_count = [](const CustomOp*) { return size_t{1}; };
    input_characteristic = [](const CustomOp* op, size_t index) { return index < self(op).required_ ? 0 : 1; };
    output_characteristic = [](const CustomOp*, size_t) { return 0; };
    input_memory = [](const CustomOp*, size_t) { return 0; };
    for (auto& each : variadic) each = [](const CustomOp*) { return 1; };
    start_version = [](const CustomOp*) { return 1; };
    end_version = [](const CustomOp*) { return 0x7fffffff; };
    create_kernel_v2 = [](const CustomOp*, const void*, const ort::KernelInfo* info, void** kernel) {
      return guarded([&] { *kernel = new Kernel(ort::Node(info)); });
    };
    compute_v2 = [](void* kernel, ort::KernelContext* context) {
      return guarded([&] { static_cast<const Kernel*>(kernel)->run(ort::Run(context)); });
    };
    destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

 private:
  static const Operator& self(const CustomOp* op) { return *static_cast<const Operator*>(op); }

  // No exception may pass through the runtime.
  template <class Work>
  static ort::Status* guarded(const Work& work) {
    try {
      work();
      return nullptr;
    } catch (const std::exception& error) {
      return ort::status(ort::kInvalidArgument, error.what());
    }
  }

  const char* name_;
  std::vector<ort::ElementType> inputs_;
  size_t required_;
};

}  // namespace requant
