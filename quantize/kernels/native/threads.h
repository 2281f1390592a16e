// Whether work is divided among threads.
#pragma once

#include <atomic>

namespace requant {

// Whether a task has run on another thread than its kernel did. The runtime does not say how many threads a session has: with
// one thread large tasks are faster, because those that share weights read them from near.
inline std::atomic<bool> several_threads{false};

inline bool has_several_threads() { return several_threads.load(std::memory_order_relaxed); }

}  // namespace requant
