// Threads for the kernels: a small pool that sleeps while idle and is asked for a thread count on every call.
//
// Why not OpenMP: torch brings its own OpenMP runtime; a second one spins against it on a machine with few cores
// (docs/decisions/0001-threads.md). Work is cut into fixed ranges by the caller's grain, never by the thread count, so
// results do not depend on it.
#pragma once
#include <cstdint>
#include <functional>

namespace polyhop {

// Runs body(begin, end) over [0, n) in ranges of `grain` on up to `threads` threads, the caller included.
// Ranges are handed out dynamically. Safe to call from several threads at once; body must not throw.
void parallel_for(int64_t n, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body);

}  // namespace polyhop
