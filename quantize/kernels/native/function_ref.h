// A reference to a function, in place of the copy that a std::function owns.
#pragma once

#include <memory>
#include <utility>

namespace requant {

template <class Signature>
class FunctionRef;

// The function must live as long as the reference: it is for arguments.
template <class... Arguments>
class FunctionRef<void(Arguments...)> {
 public:
  template <class Function>
  FunctionRef(const Function& function)
      : function_(std::addressof(function)), call_([](const void* given, Arguments... arguments) {
          (*static_cast<const Function*>(given))(std::forward<Arguments>(arguments)...);
        }) {}

  void operator()(Arguments... arguments) const { call_(function_, std::forward<Arguments>(arguments)...); }

 private:
  const void* function_;
  void (*call_)(const void*, Arguments...);
};

}  // namespace requant
