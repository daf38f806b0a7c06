// Neighbours of every node whichever way the edge points: two families of ascending lists merged, each node once, loops out.
#include <algorithm>

#include "isa.h"
#include "pool.h"

#define PH_ARGS                                                                                                    \
  (const int64_t* a_indptr, const void* a, const int64_t* b_indptr, const void* b, int64_t wide, int64_t num_nodes, \
   int64_t* indptr, void* out, int64_t threads)

PH_DECLARE(int64_t, merge_neighbours, PH_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kGrain = 1 << 10;  // nodes

// Ascending union of two ascending lists without `self`; returns its length. Writes it where `to` is not null.
template <class I>
int64_t merge(const I* a, const I* a_end, const I* b, const I* b_end, int64_t self, I* to) {
  int64_t n = 0, last = -1;
  while (a < a_end || b < b_end) {
    const int64_t next = int64_t(b == b_end || (a < a_end && *a <= *b) ? *a++ : *b++);
    if (next == last || next == self) continue;
    last = next;
    if (to) to[n] = I(next);
    ++n;
  }
  return n;
}

template <class I>
void merge_all(const int64_t* a_indptr, const I* a, const int64_t* b_indptr, const I* b, int64_t num_nodes, int64_t* indptr,
               I* out, int threads) {
  parallel_for(num_nodes, kGrain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      const int64_t n = merge(a + a_indptr[v], a + a_indptr[v + 1], b + b_indptr[v], b + b_indptr[v + 1], v,
                              out ? out + indptr[v] : nullptr);
      if (!out) indptr[v + 1] = n;
    }
  });
}

}  // namespace

int64_t merge_neighbours PH_ARGS {
  if (wide)
    merge_all(a_indptr, static_cast<const int64_t*>(a), b_indptr, static_cast<const int64_t*>(b), num_nodes, indptr,
              static_cast<int64_t*>(out), int(threads));
  else
    merge_all(a_indptr, static_cast<const int32_t*>(a), b_indptr, static_cast<const int32_t*>(b), num_nodes, indptr,
              static_cast<int32_t*>(out), int(threads));
  return 0;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
// First call, out = null: indptr[v + 1] becomes the number of neighbours of v. Second call, indptr their running sum: fills out.
PH_EXPORT int64_t ph_merge_neighbours PH_ARGS {
  return PH_PICK(merge_neighbours)(a_indptr, a, b_indptr, b, wide, num_nodes, indptr, out, threads);
}
#endif
