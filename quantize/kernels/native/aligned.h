// Arrays that begin where a cache line begins: a vector that lies across two lines takes twice as long to load.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace requant {

// In the check program (REQUANT_GUARDED) arrays end where a page without access begins instead, and scratch memory has no
// byte more than its user asked for.
#ifdef REQUANT_GUARDED
constexpr bool kGuarded = true;
void* take_memory(size_t bytes);
void release_memory(void* data, size_t bytes);
#else
constexpr bool kGuarded = false;
constexpr std::align_val_t kCacheLine{64};
inline void* take_memory(size_t bytes) { return ::operator new(bytes, kCacheLine); }
inline void release_memory(void* data, size_t) { ::operator delete(data, kCacheLine); }
#endif

template <class T>
struct CacheLines {
  using value_type = T;

  CacheLines() = default;
  template <class U>
  CacheLines(const CacheLines<U>&) {}

  T* allocate(size_t count) { return static_cast<T*>(take_memory(count * sizeof(T))); }
  void deallocate(T* data, size_t count) { release_memory(data, count * sizeof(T)); }
  bool operator==(const CacheLines&) const { return true; }
};

template <class T>
using Aligned = std::vector<T, CacheLines<T>>;

// Empties a vector, and frees its memory: "values = {}" would keep it.
template <class T>
void free_memory(std::vector<T>& values) { std::vector<T>().swap(values); }

// Memory of a thread for one use after the other; it grows to the largest one.
class Scratch {
 public:
  // Returns memory with any content. It is valid until the next call.
  uint8_t* bytes(int64_t count) {
    const size_t size = static_cast<size_t>(count);
    if (kGuarded || bytes_.size() < size) bytes_ = Aligned<uint8_t>(size);
    return bytes_.data();
  }

  // The same for values of another type.
  template <class T>
  T* values(int64_t count) { return reinterpret_cast<T*>(bytes(count * static_cast<int64_t>(sizeof(T)))); }

  float* floats(int64_t count) { return values<float>(count); }

 private:
  Aligned<uint8_t> bytes_;
};

}  // namespace requant
