// Questions about in-edge lists that need one pass over all edges: repeated sources, own loops.
#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "isa.h"
#include "pool.h"

PH_DECLARE(int64_t, edges_repeated,
           (const int64_t* indptr, const void* indices, bool wide, int64_t n, uint8_t* keep, int threads))
PH_DECLARE(int64_t, edges_loops,
           (const int64_t* indptr, const void* indices, bool wide, int64_t n, const float* weight, float* out, int threads))

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kGrain = 1 << 10;  // destinations

template <class Id>
int64_t repeated(const int64_t* indptr, const Id* indices, int64_t n, uint8_t* keep, int threads) {
  std::atomic<int64_t> total{0};
  parallel_for(n, kGrain, threads, [&](int64_t begin, int64_t end) {
    std::vector<std::pair<Id, int64_t>> list;
    int64_t found = 0;
    for (int64_t v = begin; v < end; ++v) {
      const int64_t first = indptr[v], last = indptr[v + 1];
      bool ascending = true;
      for (int64_t i = first + 1; i < last; ++i) ascending &= indices[i - 1] < indices[i];
      if (ascending) continue;
      list.clear();
      for (int64_t i = first; i < last; ++i) list.emplace_back(indices[i], i);
      std::sort(list.begin(), list.end());
      for (size_t k = 1; k < list.size(); ++k)
        if (list[k].first == list[k - 1].first) {
          ++found;
          if (keep) keep[list[k].second] = 0;
        }
    }
    total.fetch_add(found, std::memory_order_relaxed);
  });
  return total.load();
}

template <class Id>
int64_t loops(const int64_t* indptr, const Id* indices, int64_t n, const float* weight, float* out, int threads) {
  std::atomic<int64_t> total{0};
  parallel_for(n, kGrain, threads, [&](int64_t begin, int64_t end) {
    int64_t found = 0;
    for (int64_t v = begin; v < end; ++v) {
      out[v] = 0.0f;
      for (int64_t i = indptr[v]; i < indptr[v + 1]; ++i)
        if (int64_t(indices[i]) == v) {
          ++found;
          out[v] = weight ? weight[i] : 1.0f;
        }
    }
    total.fetch_add(found, std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace

// Edges whose source already stands earlier in the same list; keep[] (all 1 on entry, may be null) becomes 0 there.
int64_t edges_repeated(const int64_t* indptr, const void* indices, bool wide, int64_t n, uint8_t* keep, int threads) {
  return wide ? repeated(indptr, static_cast<const int64_t*>(indices), n, keep, threads)
              : repeated(indptr, static_cast<const int32_t*>(indices), n, keep, threads);
}

// Number of loops; out[v] is the weight of v's (last) loop, 0 where it has none.
int64_t edges_loops(const int64_t* indptr, const void* indices, bool wide, int64_t n, const float* weight, float* out,
                    int threads) {
  return wide ? loops(indptr, static_cast<const int64_t*>(indices), n, weight, out, threads)
              : loops(indptr, static_cast<const int32_t*>(indices), n, weight, out, threads);
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_edges_repeated(const int64_t* indptr, const void* indices, int64_t wide, int64_t n, uint8_t* keep,
                                    int64_t threads) {
  return PH_PICK(edges_repeated)(indptr, indices, wide != 0, n, keep, int(threads));
}

PH_EXPORT int64_t ph_edges_loops(const int64_t* indptr, const void* indices, int64_t wide, int64_t n, const float* weight,
                                 float* out, int64_t threads) {
  return PH_PICK(edges_loops)(indptr, indices, wide != 0, n, weight, out, int(threads));
}
#endif
