// Arrays that begin where a cache line begins: a vector that lies across two lines takes twice as long to load.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace requant {

template <class T>
struct CacheLines {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  CacheLines() = default;
  template <class U>
  CacheLines(const CacheLines<U>&) {}

  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* data, size_t) { ::operator delete(data, kLine); }
  bool operator==(const CacheLines&) const { return true; }
};

template <class T>
using Aligned = std::vector<T, CacheLines<T>>;

}  // namespace requant
