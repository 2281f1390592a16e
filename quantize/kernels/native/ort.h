// The part of ONNX Runtime's C interface that the operators use, declared here so that no header of it is needed.
//
// The interface is a table of functions that only grows: a function keeps its slot in all later versions.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "threads.h"

namespace requant::ort {

struct Status;
struct Value;
struct ShapeInfo;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct Domain;
struct TypeInfo;

constexpr uint32_t kOldest = 23;  // version of the interface in ONNX Runtime 1.23

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*version_string)();
};

enum Slot : size_t {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kCastTypeInfoToTensorInfo = 55,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeFloat = 85,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTypeInfo = 98,
  kReleaseTensorTypeAndShapeInfo = 99,
  kKernelInfoGetAttributeArrayInt64 = 163,
  kKernelInfoGetInputCount = 230,
  kKernelInfoGetInputTypeInfo = 234,
  kKernelInfoGetConstantInputTensor = 249,
  kKernelContextParallelFor = 274,
};

enum ElementType : int { kAny = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kInt16 = 5, kInt32 = 6, kBool = 9 };
enum Characteristic : int { kRequired = 0, kVariadic = 2 };
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

extern std::atomic<const void* const*> api;  // set when the library is registered, the same by each session

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class Result, class... Arguments>
Result call(Slot slot, Arguments... arguments) {
  void* function = const_cast<void*>(api.load(std::memory_order_relaxed)[slot]);
  return reinterpret_cast<Result (*)(Arguments...)>(function)(arguments...);
}

inline Status* status(ErrorCode code, const char* message) {
  return call<Status*>(kCreateStatus, code, message);
}

// Calls a function that returns a status, and throws its message.
template <class... Arguments>
void invoke(Slot slot, Arguments... arguments) {
  Status* failed = call<Status*>(slot, arguments...);
  if (failed == nullptr) return;
  std::string message = call<const char*>(kGetErrorMessage, static_cast<const Status*>(failed));
  call<void>(kReleaseStatus, failed);
  throw Failure(message);
}

// The layout of OrtCustomOp up to version 18.
struct CustomOp {
  uint32_t version = 18;
  void* create_kernel = nullptr;
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*provider)(const CustomOp*) = nullptr;
  ElementType (*input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*input_count)(const CustomOp*) = nullptr;
  ElementType (*output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*output_count)(const CustomOp*) = nullptr;
  void* compute = nullptr;
  void (*destroy)(void* kernel) = nullptr;
  int (*input_characteristic)(const CustomOp*, size_t) = nullptr;  // 0 required, 1 optional
  int (*output_characteristic)(const CustomOp*, size_t) = nullptr;
  int (*input_memory)(const CustomOp*, size_t) = nullptr;
  int (*variadic[4])(const CustomOp*) = {};
  Status* (*create_kernel_v2)(const CustomOp*, const void* api, const KernelInfo*, void** kernel) = nullptr;
  Status* (*compute_v2)(void* kernel, KernelContext*) = nullptr;
  void* infer_shape = nullptr;
  int (*start_version)(const CustomOp*) = nullptr;
  int (*end_version)(const CustomOp*) = nullptr;
  size_t (*in_place)(int** inputs, int** outputs) = nullptr;  // pairs of an input and the output that may replace it
  void (*release_in_place)(int* inputs, int* outputs) = nullptr;
  void* alias[2] = {};
};

// A tensor's shape and data. The data belong to the runtime. A tensor of bool stands for an input that the node omits, because
// the runtime refuses omitted inputs where it does not know of each input by itself.
struct Tensor {
  std::vector<int64_t> shape;
  void* data = nullptr;  // null too if the size is 0
  bool present = false;

  explicit operator bool() const { return present; }
  int64_t size() const {
    int64_t count = 1;
    for (int64_t length : shape) count *= length;
    return count;
  }
  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

inline Tensor tensor_of(const Value* value) {
  Tensor tensor;
  ShapeInfo* info = nullptr;
  invoke(kGetTensorTypeAndShape, value, &info);
  ElementType type = kAny;
  invoke(kGetTensorElementType, static_cast<const ShapeInfo*>(info), &type);
  size_t rank = 0;
  invoke(kGetDimensionsCount, static_cast<const ShapeInfo*>(info), &rank);
  tensor.shape.resize(rank);
  invoke(kGetDimensions, static_cast<const ShapeInfo*>(info), tensor.shape.data(), rank);
  call<void>(kReleaseTensorTypeAndShapeInfo, info);
  if (type == kBool) return {};
  invoke(kGetTensorMutableData, const_cast<Value*>(value), &tensor.data);
  tensor.present = true;
  return tensor;
}

// What is known of a node when its kernel is created.
class Node {
 public:
  explicit Node(const KernelInfo* info) : info_(info) {}

  // Returns the number of inputs, with those that stand for omitted ones.
  size_t count() const {
    size_t count = 0;
    invoke(kKernelInfoGetInputCount, info_, &count);
    return count;
  }

  // Returns the element type of an input; kAny if the node omits it, and if it is no tensor.
  ElementType type(size_t index) const {
    if (index >= count()) return kAny;
    TypeInfo* info = nullptr;
    invoke(kKernelInfoGetInputTypeInfo, info_, index, &info);
    const ShapeInfo* tensor = nullptr;
    ElementType type = kAny;
    if (!absent(call<Status*>(kCastTypeInfoToTensorInfo, static_cast<const TypeInfo*>(info), &tensor)) && tensor != nullptr)
      absent(call<Status*>(kGetTensorElementType, tensor, &type));
    call<void>(kReleaseTypeInfo, info);
    return type == kBool ? kAny : type;
  }

  // Returns an input, which must be a constant; empty if the node omits it.
  Tensor constant(size_t index) const {
    if (type(index) == kAny) return {};
    int is_constant = 0;
    const Value* value = nullptr;
    invoke(kKernelInfoGetConstantInputTensor, info_, index, &is_constant, &value);
    if (!is_constant || value == nullptr) throw Failure("ai.requant: input " + std::to_string(index) + " must be a constant");
    return tensor_of(value);
  }

  int64_t attribute(const char* name, int64_t otherwise) const {
    int64_t value = otherwise;
    return absent(call<Status*>(kKernelInfoGetAttributeInt64, info_, name, &value)) ? otherwise : value;
  }

  float real_attribute(const char* name, float otherwise) const {
    float value = otherwise;
    return absent(call<Status*>(kKernelInfoGetAttributeFloat, info_, name, &value)) ? otherwise : value;
  }

  std::vector<int64_t> attributes(const char* name, std::vector<int64_t> otherwise) const {
    size_t count = 0;
    int64_t* nowhere = nullptr;
    if (absent(call<Status*>(kKernelInfoGetAttributeArrayInt64, info_, name, nowhere, &count))) return otherwise;
    std::vector<int64_t> values(count);
    if (count) invoke(kKernelInfoGetAttributeArrayInt64, info_, name, values.data(), &count);
    return values;
  }

 private:
  static bool absent(Status* failed) {
    if (failed != nullptr) call<void>(kReleaseStatus, failed);
    return failed != nullptr;
  }

  const KernelInfo* info_;
};

// Work on the threads of the runtime, through which no exception may pass: the first one is kept.
template <class Work>
class Kept {
 public:
  explicit Kept(const Work& work) : work_(work) {}

  void run(size_t index) noexcept {
    if (std::this_thread::get_id() != caller_) several_threads.store(true, std::memory_order_relaxed);
    try {
      work_(index);
    } catch (...) {
      if (!any_.test_and_set()) first_ = std::current_exception();
    }
  }

  // Throws the first exception again, if there was one.
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  const Work& work_;
  const std::thread::id caller_ = std::this_thread::get_id();
  std::atomic_flag any_;
  std::exception_ptr first_;
};

// One run of a kernel.
class Run {
 public:
  explicit Run(KernelContext* context) : context_(context) {}

  // Returns an input, whose index is below the number of inputs; empty if the node omits it.
  Tensor input(size_t index) const {
    const Value* value = nullptr;
    invoke(kKernelContextGetInput, static_cast<const KernelContext*>(context_), index, &value);
    return tensor_of(value);
  }

  uint8_t* output(const std::vector<int64_t>& shape, size_t index = 0) const {
    Value* value = nullptr;
    invoke(kKernelContextGetOutput, context_, index, shape.data(), shape.size(), &value);
    void* data = nullptr;
    invoke(kGetTensorMutableData, value, &data);
    return static_cast<uint8_t*>(data);
  }

  // Calls work(i) for 0 <= i < count, on the threads of the session.
  template <class Work>
  void parallel(size_t count, const Work& work) const {
    if (count == 1) return work(size_t{0});
    Kept<Work> kept(work);
    void (*each)(void*, size_t) = [](void* given, size_t index) { static_cast<Kept<Work>*>(given)->run(index); };
    void* given = &kept;
    invoke(kKernelContextParallelFor, static_cast<const KernelContext*>(context_), each, count, size_t{0}, given);
    kept.rethrow();
  }

 private:
  KernelContext* context_;
};

}  // namespace requant::ort
