// Which sources of a part lie elsewhere, as one bit per node, and the row that each source has behind the own nodes.
#include <cstdint>

#include "isa.h"

#define PH_MARK_ARGS (const void* ids, int64_t wide, int64_t n, int64_t start, int64_t stop, uint64_t* bits)
#define PH_RANK_ARGS (const uint64_t* bits, int64_t num_words, int64_t* rank)
#define PH_LIST_ARGS (const uint64_t* bits, int64_t num_words, int64_t* out)
#define PH_ROWS_ARGS                                                                                             \
  (const void* ids, int64_t wide, int64_t n, int64_t start, int64_t stop, const uint64_t* bits, const int64_t* rank, \
   int32_t* out)

PH_DECLARE(int64_t, halo_mark, PH_MARK_ARGS)
PH_DECLARE(int64_t, halo_rank, PH_RANK_ARGS)
PH_DECLARE(int64_t, halo_list, PH_LIST_ARGS)
PH_DECLARE(int64_t, halo_rows, PH_ROWS_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

template <class I>
int64_t mark(const I* ids, int64_t n, int64_t start, int64_t stop, uint64_t* bits) {
  int64_t remote = 0;
  for (int64_t e = 0; e < n; ++e) {
    const int64_t v = int64_t(ids[e]);
    if (v >= start && v < stop) continue;
    bits[v >> 6] |= uint64_t(1) << (v & 63);
    ++remote;
  }
  return remote;
}

template <class I>
void rows(const I* ids, int64_t n, int64_t start, int64_t stop, const uint64_t* bits, const int64_t* rank, int32_t* out) {
  const int64_t own = stop - start;
  for (int64_t e = 0; e < n; ++e) {
    const int64_t v = int64_t(ids[e]);
    if (v >= start && v < stop) {
      out[e] = int32_t(v - start);
    } else {
      const uint64_t below = bits[v >> 6] & ((uint64_t(1) << (v & 63)) - 1);
      out[e] = int32_t(own + rank[v >> 6] + __builtin_popcountll(below));
    }
  }
}

}  // namespace

int64_t halo_mark PH_MARK_ARGS {
  return wide ? mark(static_cast<const int64_t*>(ids), n, start, stop, bits)
              : mark(static_cast<const int32_t*>(ids), n, start, stop, bits);
}

int64_t halo_rank PH_RANK_ARGS {
  int64_t total = 0;
  for (int64_t w = 0; w < num_words; ++w) rank[w] = total, total += __builtin_popcountll(bits[w]);
  return total;
}

int64_t halo_list PH_LIST_ARGS {
  int64_t n = 0;
  for (int64_t w = 0; w < num_words; ++w)
    for (uint64_t left = bits[w]; left; left &= left - 1) out[n++] = w * 64 + __builtin_ctzll(left);
  return n;
}

int64_t halo_rows PH_ROWS_ARGS {
  if (wide)
    rows(static_cast<const int64_t*>(ids), n, start, stop, bits, rank, out);
  else
    rows(static_cast<const int32_t*>(ids), n, start, stop, bits, rank, out);
  return 0;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
// Sets the bit of every id outside [start, stop); returns how many ids these were, repeats counted.
PH_EXPORT int64_t ph_halo_mark PH_MARK_ARGS { return PH_PICK(halo_mark)(ids, wide, n, start, stop, bits); }

// rank[w] becomes the number of bits set before word w; returns how many are set in all.
PH_EXPORT int64_t ph_halo_rank PH_RANK_ARGS { return PH_PICK(halo_rank)(bits, num_words, rank); }

// Positions of the set bits, ascending.
PH_EXPORT int64_t ph_halo_list PH_LIST_ARGS { return PH_PICK(halo_list)(bits, num_words, out); }

// Row of each id: own nodes first, then the marked ones, both ascending. `out` may be where int32 ids stand.
PH_EXPORT int64_t ph_halo_rows PH_ROWS_ARGS { return PH_PICK(halo_rows)(ids, wide, n, start, stop, bits, rank, out); }
#endif
