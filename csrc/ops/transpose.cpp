// Stable counting sort of edges by source. Within a source, edges keep ascending position, for any number of threads.
#include <atomic>
#include <memory>
#include <vector>

#include "isa.h"
#include "pool.h"

#define PH_ARGS                                                                                                     \
  (const int64_t* indptr, const void* indices, int64_t wide, int64_t num_dst, int64_t num_src, int64_t num_edges,    \
   int64_t* t_indptr, void* t_indices, void* t_edge, int64_t threads)

PH_DECLARE(int64_t, transpose, PH_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

// Threads share the sources: each pass over the edges is cut into slices, and slice k of source s writes behind slices
// before it. One table of counts per slice, so slices are few and the table is bounded.
template <class I>
void sort_edges(const int64_t* indptr, const I* indices, int64_t num_dst, int64_t num_src, int64_t num_edges,
                int64_t* t_indptr, I* t_indices, I* t_edge, int threads) {
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(threads, 8));
  const int64_t slices = num_edges < (1 << 16) || num_src > num_edges ? 1 : most;
  const int64_t step = (num_edges + slices - 1) / std::max<int64_t>(slices, 1);
  std::vector<int64_t> counts(size_t(slices) * size_t(num_src), 0);
  parallel_for(slices, 1, threads, [&](int64_t k, int64_t) {
    int64_t* count = counts.data() + k * num_src;
    const int64_t end = std::min(num_edges, (k + 1) * step);
    for (int64_t e = k * step; e < end; ++e) ++count[indices[e]];
  });
  int64_t total = 0;
  for (int64_t s = 0; s < num_src; ++s) {
    t_indptr[s] = total;
    for (int64_t k = 0; k < slices; ++k) {
      int64_t& slot = counts[size_t(k) * size_t(num_src) + size_t(s)];
      const int64_t here = slot;
      slot = total;
      total += here;
    }
  }
  t_indptr[num_src] = total;
  parallel_for(slices, 1, threads, [&](int64_t k, int64_t) {
    int64_t* next = counts.data() + k * num_src;
    const int64_t begin = k * step, end = std::min(num_edges, (k + 1) * step);
    if (begin >= end) return;
    int64_t row = std::upper_bound(indptr, indptr + num_dst + 1, begin) - indptr - 1;
    constexpr int64_t kAhead = 24;
    for (int64_t e = begin; e < end; ++e) {
      while (indptr[row + 1] <= e) ++row;
      if (e + 2 * kAhead < end) __builtin_prefetch(next + indices[e + 2 * kAhead], 1);
      if (e + kAhead < end) {
        const int64_t soon = next[indices[e + kAhead]];
        __builtin_prefetch(t_indices + soon, 1);
        __builtin_prefetch(t_edge + soon, 1);
      }
      const int64_t at = next[indices[e]]++;
      t_indices[at] = I(row);
      t_edge[at] = I(e);
    }
  });
}

}  // namespace

int64_t transpose PH_ARGS {
  if (wide)
    sort_edges(indptr, static_cast<const int64_t*>(indices), num_dst, num_src, num_edges, t_indptr,
               static_cast<int64_t*>(t_indices), static_cast<int64_t*>(t_edge), int(threads));
  else
    sort_edges(indptr, static_cast<const int32_t*>(indices), num_dst, num_src, num_edges, t_indptr,
               static_cast<int32_t*>(t_indices), static_cast<int32_t*>(t_edge), int(threads));
  return 0;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_transpose PH_ARGS {
  return PH_PICK(transpose)(indptr, indices, wide, num_dst, num_src, num_edges, t_indptr, t_indices, t_edge, threads);
}
#endif
