// What a program calls: RegisterCustomOps through SessionOptions.register_custom_ops_library, and a description.
#include <string>

#include "operators.h"
#include "target.h"

#define REQUANT_EXPORT extern "C" __attribute__((visibility("default")))

namespace requant {

std::atomic<const void* const*> ort::api = nullptr;

ort::Status* guarded(FunctionRef<void()> work) {
  try {
    work();
    return nullptr;
  } catch (const std::exception& error) {
    return ort::status(ort::kInvalidArgument, error.what());
  }
}

namespace {

// Returns the operators, each under all its names.
const std::vector<std::vector<ort::CustomOp*>>& operators() {
  static const std::vector<std::vector<ort::CustomOp*>> all = {
      table_operators(), convolution_operators(), global_mean_operators(), maximum_operators(),
      mean_operators(),  concat_operators(),      sum_operators(),         product_operators(),
      matmul_operators(), attention_operators(),  window_attention_operators(), normalization_operators(), gru_operators(),
      lstm_operators(),  matmul_nbits_operators(), rotary_operators(),     quantize_operators(),
      cached_attention_operators(), quantized_cache_attention_operators(), resize_operators(), softmax_operators(),
      lines_operators(), dequantize_softmax_operators(), conv_transpose_operators(), depth_to_space_operators(),
      group_normalization_operators()};
  return all;
}

// Returns the domain with all operators. Sessions share it, so it is never released.
ort::Domain* domain() {
  static ort::Domain* made = [] {
    ort::Domain* fresh = nullptr;
    ort::invoke(ort::kCreateCustomOpDomain, "ai.requant", &fresh);
    for (const auto& names : operators())
      for (ort::CustomOp* each : names)
        ort::invoke(ort::kCustomOpDomainAdd, fresh, static_cast<const ort::CustomOp*>(each));
    return fresh;
  }();
  return made;
}

std::string quoted(const char* text) { return std::string("\"") + text + "\""; }

std::string described() {
  std::string text = "{\"operators\": [";
  for (const auto& names : operators()) text += (text.back() == '[' ? "" : ", ") + quoted(names[0]->name(names[0]));
  text += "], \"available\": [";
  bool first = true;
  for (const Target* target : targets()) {
    if (!target->available()) continue;
    text += (first ? "" : ", ") + quoted(target->name);
    first = false;
  }
  text += "], \"isa\": ";
  try {
    text += quoted(chosen().name);
  } catch (const std::exception&) {
    text += "null";
  }
  return text += "}";
}

}  // namespace
}  // namespace requant

REQUANT_EXPORT requant::ort::Status* RegisterCustomOps(requant::ort::SessionOptions* options,
                                                       const requant::ort::ApiBase* base) {
  using namespace requant;
  const void* const* api = base->get_api(ort::kOldest);
  if (api == nullptr) {  // no table to make a status with: the oldest one that has these slots
    ort::api = base->get_api(1);
    return ort::status(ort::kFail, "ai.requant: the operators need ONNX Runtime 1.23 or newer");
  }
  ort::api = api;
  return guarded([&] {
    chosen();
    ort::invoke(ort::kAddCustomOpDomain, options, domain());
  });
}

// Returns JSON: the operators, the instruction sets that this CPU has, and the chosen one.
REQUANT_EXPORT const char* RequantKernels() {
  static const std::string text = requant::described();  // as long as the library
  return text.c_str();
}

// The C++ library calls this to make the name of an exception that nobody catches readable, and its own version is a sixth of
// the size of this library. This one says that a name can't be read: then the C++ library prints it as it is.
extern "C" char* __cxa_demangle(const char*, char*, size_t*, int* status) {
  constexpr int kInvalidName = -2;
  if (status != nullptr) *status = kInvalidName;
  return nullptr;
}
