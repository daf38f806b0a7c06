// Edges that do not fit in memory, a chunk at a time: counted, filed into bins of destinations, and a bin's edges grouped.
// One thread: the caller streams from a disk, and order must not depend on a thread count.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "isa.h"

#define PH_COUNT_ARGS                                                                                         \
  (const void* src, const void* dst, int64_t wide, int64_t n, int64_t limit, int32_t* in_degree, int32_t* out_degree)
#define PH_BIN_ARGS                                                                                               \
  (const void* key, const void* value, int64_t wide, const float* weight, int64_t n, int64_t limit, const void* map, \
   int64_t apart, const int64_t* bounds, int64_t num_bins, const int32_t* hint, int64_t shift, int32_t* out_key,    \
   void* out_value, int64_t out_wide, float* out_weight, int64_t* counts)
#define PH_GROUP_ARGS                                                                                           \
  (const int32_t* key, const void* value, int64_t wide, const float* weight, int64_t n, int64_t num_rows, int64_t* indptr, \
   void* out, float* out_weight)
#define PH_UNIQUE_ARGS (int64_t* indptr, void* values, int64_t wide, int64_t num_rows, int64_t first)
#define PH_SUM_ARGS (int64_t* indptr, int32_t* values, const float* weight, int64_t num_rows, float* out_weight)

PH_DECLARE(int64_t, count_edges, PH_COUNT_ARGS)
PH_DECLARE(int64_t, bin_edges, PH_BIN_ARGS)
PH_DECLARE(int64_t, group_edges, PH_GROUP_ARGS)
PH_DECLARE(int64_t, unique_lists, PH_UNIQUE_ARGS)
PH_DECLARE(int64_t, sum_lists, PH_SUM_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kAhead = 32;  // records whose table entries are asked for in time

constexpr int kBuckets = 256;
constexpr int64_t kFew = 1 << 18;  // counters that stay in cache anyway

template <class I>
int64_t first_outside(const I* ids, int64_t n, int64_t limit) {
  uint64_t worst = 0;
  for (int64_t e = 0; e < n; ++e) worst = std::max(worst, uint64_t(int64_t(ids[e])));
  if (worst < uint64_t(limit)) return n;
  int64_t e = 0;
  while (uint64_t(int64_t(ids[e])) < uint64_t(limit)) ++e;
  return e;
}

// Adding one to counters all over a large array waits for memory each time: ids are first sorted roughly, so that those of
// a bucket meet counters that are in cache.
template <class I>
void count_ids(const I* ids, int64_t n, int64_t limit, int32_t* count, I* scratch) {
  if (limit <= kFew || n < kBuckets) {
    for (int64_t e = 0; e < n; ++e) ++count[ids[e]];
    return;
  }
  int shift = 0;
  while (((limit - 1) >> shift) >= kBuckets) ++shift;
  int64_t next[kBuckets] = {0};
  for (int64_t e = 0; e < n; ++e) ++next[int64_t(ids[e]) >> shift];
  for (int64_t b = 0, total = 0; b < kBuckets; ++b) {
    const int64_t here = next[b];
    next[b] = total;
    total += here;
  }
  for (int64_t e = 0; e < n; ++e) scratch[next[int64_t(ids[e]) >> shift]++] = ids[e];
  for (int64_t e = 0; e < n; ++e) ++count[scratch[e]];
}

template <class I>
int64_t count(const I* src, const I* dst, int64_t n, int64_t limit, int32_t* in_degree, int32_t* out_degree) {
  const int64_t bad = std::min(first_outside(src, n, limit), first_outside(dst, n, limit));
  if (bad < n) return bad;
  std::unique_ptr<I[]> scratch(new I[size_t(n)]);
  count_ids(src, n, limit, out_degree, scratch.get());
  count_ids(dst, n, limit, in_degree, scratch.get());
  return -1;
}

// Stable: records of a bin keep their order. First the bin and the place in it of every record, then the move.
template <class In, class Out>
int64_t bin(const In* key, const In* value, const float* weight, int64_t n, int64_t limit, const Out* map, bool apart,
            const int64_t* bounds, int64_t num_bins, const int32_t* hint, int64_t shift, int32_t* out_key, Out* out_value,
            float* out_weight, int64_t* counts) {
  std::unique_ptr<int32_t[]> bins(new int32_t[size_t(n)]), local(new int32_t[size_t(n)]);
  std::unique_ptr<Out[]> mapped(map ? new Out[size_t(n)] : nullptr);
  std::fill(counts, counts + num_bins, int64_t(0));
  for (int64_t e = 0; e < n; ++e) {
    if (uint64_t(int64_t(key[e])) >= uint64_t(limit) || uint64_t(int64_t(value[e])) >= uint64_t(limit)) return e;
    if (map && e + kAhead < n) {
      __builtin_prefetch(map + key[e + kAhead]);
      __builtin_prefetch(map + value[e + kAhead]);
    }
    const int64_t k = map ? int64_t(map[key[e]]) : int64_t(key[e]);
    if (map) mapped[size_t(e)] = map[value[e]];
    if (apart && k == (map ? int64_t(mapped[size_t(e)]) : int64_t(value[e]))) {
      bins[size_t(e)] = -1;
      continue;
    }
    int64_t b = hint[k >> shift];
    while (k >= bounds[b + 1]) ++b;
    ++counts[b];
    bins[size_t(e)] = int32_t(b);
    local[size_t(e)] = int32_t(k - bounds[b]);
  }
  std::vector<int64_t> next(static_cast<size_t>(num_bins));
  for (int64_t b = 0, total = 0; b < num_bins; ++b) next[size_t(b)] = total, total += counts[b];
  for (int64_t e = 0; e < n; ++e) {
    if (bins[size_t(e)] < 0) continue;
    const int64_t at = next[size_t(bins[size_t(e)])]++;
    out_key[at] = local[size_t(e)];
    out_value[at] = map ? mapped[size_t(e)] : Out(value[e]);
    if (weight) out_weight[at] = weight[e];
  }
  return -1;
}

template <class I>
int64_t group(const int32_t* key, const I* value, const float* weight, int64_t n, int64_t num_rows, int64_t* indptr, I* out,
              float* out_weight) {
  std::fill(indptr, indptr + num_rows + 1, int64_t(0));
  for (int64_t e = 0; e < n; ++e) {
    if (uint32_t(key[e]) >= uint64_t(num_rows)) return e;
    ++indptr[key[e] + 1];
  }
  for (int64_t r = 0; r < num_rows; ++r) indptr[r + 1] += indptr[r];
  // indptr[r] serves as the next place of row r, and stands at the end of r afterwards: shifted back below.
  for (int64_t e = 0; e < n; ++e) {
    const int64_t at = indptr[key[e]]++;
    out[at] = value ? value[e] : I(e);
    if (weight) out_weight[at] = weight[e];
  }
  for (int64_t r = num_rows; r > 0; --r) indptr[r] = indptr[r - 1];
  indptr[0] = 0;
  return -1;
}

template <class I>
int64_t unique(int64_t* indptr, I* values, int64_t num_rows, int64_t first) {
  int64_t to = 0, begin = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t end = indptr[r + 1];
    std::sort(values + begin, values + end);
    const int64_t self = first + r, start = to;
    for (int64_t i = begin; i < end; ++i)
      if (int64_t(values[i]) != self && (to == start || values[to - 1] != values[i])) values[to++] = values[i];
    indptr[r + 1] = to;
    begin = end;
  }
  return to;
}

// Values of a list that are the same become one, where the first of them stood; a table of places finds them again.
int64_t sum(int64_t* indptr, int32_t* values, const float* weight, int64_t num_rows, float* out_weight) {
  std::vector<int32_t> table;
  std::vector<double> total;
  int64_t to = 0, begin = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t end = indptr[r + 1], start = to;
    size_t size = 16;
    while (int64_t(size) < 2 * (end - begin)) size *= 2;
    table.assign(size, -1);
    total.clear();
    for (int64_t i = begin; i < end; ++i) {
      const int32_t v = values[i];
      size_t at = (uint32_t(v) * size_t(0x9E3779B1u)) & (size - 1);
      while (table[at] >= 0 && values[start + table[at]] != v) at = (at + 1) & (size - 1);
      if (table[at] < 0) {
        table[at] = int32_t(to - start);
        total.push_back(0.0);
        values[to++] = v;
      }
      total[size_t(table[at])] += weight ? double(weight[i]) : 1.0;
    }
    for (size_t k = 0; k < total.size(); ++k) out_weight[start + int64_t(k)] = float(total[k]);
    indptr[r + 1] = to;
    begin = end;
  }
  return to;
}

}  // namespace

int64_t count_edges PH_COUNT_ARGS {
  if (wide)
    return count(static_cast<const int64_t*>(src), static_cast<const int64_t*>(dst), n, limit, in_degree, out_degree);
  return count(static_cast<const int32_t*>(src), static_cast<const int32_t*>(dst), n, limit, in_degree, out_degree);
}

#define PH_BIN(In, Out)                                                                                            \
  return bin(static_cast<const In*>(key), static_cast<const In*>(value), weight, n, limit, static_cast<const Out*>(map), \
             apart != 0, bounds, num_bins, hint, shift, out_key, static_cast<Out*>(out_value), out_weight, counts)

int64_t bin_edges PH_BIN_ARGS {
  if (wide && out_wide) PH_BIN(int64_t, int64_t);
  if (wide) PH_BIN(int64_t, int32_t);
  if (out_wide) PH_BIN(int32_t, int64_t);
  PH_BIN(int32_t, int32_t);
}

int64_t group_edges PH_GROUP_ARGS {
  if (wide)
    return group(key, static_cast<const int64_t*>(value), weight, n, num_rows, indptr, static_cast<int64_t*>(out), out_weight);
  return group(key, static_cast<const int32_t*>(value), weight, n, num_rows, indptr, static_cast<int32_t*>(out), out_weight);
}

int64_t unique_lists PH_UNIQUE_ARGS {
  return wide ? unique(indptr, static_cast<int64_t*>(values), num_rows, first)
              : unique(indptr, static_cast<int32_t*>(values), num_rows, first);
}

int64_t sum_lists PH_SUM_ARGS { return sum(indptr, values, weight, num_rows, out_weight); }

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
// The first three return -1, or the position of the first record that is out of range (then nothing else is promised).
PH_EXPORT int64_t ph_count_edges PH_COUNT_ARGS {
  return PH_PICK(count_edges)(src, dst, wide, n, limit, in_degree, out_degree);
}

PH_EXPORT int64_t ph_bin_edges PH_BIN_ARGS {
  return PH_PICK(bin_edges)(key, value, wide, weight, n, limit, map, apart, bounds, num_bins, hint, shift, out_key, out_value,
                            out_wide, out_weight, counts);
}

PH_EXPORT int64_t ph_group_edges PH_GROUP_ARGS {
  return PH_PICK(group_edges)(key, value, wide, weight, n, num_rows, indptr, out, out_weight);
}

// Sorts each list, drops repeats and first + r from list r, closes the gaps; returns how many values stay.
PH_EXPORT int64_t ph_unique_lists PH_UNIQUE_ARGS { return PH_PICK(unique_lists)(indptr, values, wide, num_rows, first); }

// Sums equal values of each list, where the first stood, and closes the gaps; returns how many values stay. `out_weight` may
// be `weight`: a sum is written only after all it is made of was read.
PH_EXPORT int64_t ph_sum_lists PH_SUM_ARGS { return PH_PICK(sum_lists)(indptr, values, weight, num_rows, out_weight); }
#endif
