// Row gather (with conversion to float), from one matrix or two, and deterministic row scatter-add.
#include <atomic>
#include <vector>

#include "isa.h"
#include "pool.h"
#include "simd.h"
#include "two_places.h"

#define PH_GATHER_ARGS                                                                                              \
  (const void* values, int64_t type, int64_t num_rows, int64_t width, const int64_t* ids, int64_t n,                 \
   const void* scale, void* out, int64_t threads)
#define PH_POOLED_ARGS                                                                                              \
  (const void* values, int64_t num_first, const void* second, int64_t num_second, int64_t type, int64_t width,       \
   const int64_t* ids, int64_t n, const void* scale, void* out, int64_t threads)
#define PH_SCATTER_ARGS                                                                                      \
  (void* out, int64_t type, int64_t num_rows, const int64_t* ids, int64_t n, const void* rows, int64_t width, \
   int64_t threads)

PH_DECLARE(int64_t, gather_rows, PH_POOLED_ARGS)
PH_DECLARE(int64_t, scatter_add_rows, PH_SCATTER_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kAhead = 8;  // rows between asking for a target row and adding to it

int64_t first_bad(const int64_t* ids, int64_t n, int64_t limit, int threads) {
  std::atomic<int64_t> bad{n};
  parallel_for(n, 1 << 16, threads, [&](int64_t begin, int64_t end) {
    uint64_t worst = 0;
    for (int64_t k = begin; k < end; ++k) worst |= uint64_t(uint64_t(ids[k]) >= uint64_t(limit));
    if (!worst) return;
    int64_t k = begin;
    while (uint64_t(ids[k]) < uint64_t(limit)) ++k;
    int64_t known = bad.load();
    while (k < known && !bad.compare_exchange_weak(known, k)) {
    }
  });
  return bad.load() < n ? bad.load() : -1;
}

template <class T>
void copy_row(const T* from, const Sum<T>* scale, int64_t width, Sum<T>* to) {
  if (scale)
    for (int64_t c = 0; c < width; ++c) to[c] = to_sum(from[c]) * scale[c];
  else
    for (int64_t c = 0; c < width; ++c) to[c] = to_sum(from[c]);
}
inline void copy_row(const float* from, const float* scale, int64_t width, float* to) {
  if (!scale) {
    std::memcpy(to, from, size_t(width) * sizeof(float));
    return;
  }
  for (int64_t c = 0; c < width; ++c) to[c] = from[c] * scale[c];
}

// row(id) is the address of a stored row.
template <class T, class Row>
void gather(const Row& row, int64_t width, const int64_t* ids, int64_t n, const Sum<T>* scale, Sum<T>* out,
            int threads) {
  if (width == 0) return;
  const int lines = std::min(32, lines_of(width * int64_t(sizeof(T))));
  const int64_t ahead = rows_ahead(lines);
  parallel_for(n, std::max<int64_t>(16, (1 << 15) / width), threads, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + ahead < n) prefetch(row(ids[k + ahead]), lines);
      copy_row(row(ids[k]), scale, width, out + k * width);
    }
  });
}

// From one matrix, or from two: ids from num_first on are rows of the second.
template <class T>
void gather_from(const T* first, int64_t num_first, const T* second, int64_t width, const int64_t* ids, int64_t n,
                 const Sum<T>* scale, Sum<T>* out, int threads) {
  const TwoPlaces<T> two(first, num_first, second, width);
  if (second)
    gather<T>([=](int64_t r) { return two.row(r); }, width, ids, n, scale, out, threads);
  else
    gather<T>([=](int64_t r) { return first + r * width; }, width, ids, n, scale, out, threads);
}

template <class T>
void add_row(T* to, const T* from, int64_t width) {
  for (int64_t c = 0; c < width; ++c) put(to + c, to_sum(to[c]) + to_sum(from[c]));
}

// Target rows are cut into fixed stretches; the positions of each stretch are collected in order, and stretches are
// handed to threads. Every target row receives its additions in ascending position, as one thread would do it.
template <class T>
void scatter(T* out, int64_t num_rows, const int64_t* ids, int64_t n, const T* rows, int64_t width, int threads) {
  if (threads <= 1 || n * width < (1 << 14)) {
    for (int64_t k = 0; k < n; ++k) {
      if (k + kAhead < n) __builtin_prefetch(out + ids[k + kAhead] * width, 1);
      add_row(out + ids[k] * width, rows + k * width, width);
    }
    return;
  }
  constexpr int64_t kStretches = 512;
  const int64_t per = (num_rows + kStretches - 1) / kStretches;
  std::vector<int64_t> start(kStretches + 1, 0), order(size_t(n), 0);
  for (int64_t k = 0; k < n; ++k) ++start[size_t(ids[k] / per + 1)];
  for (size_t s = 1; s <= size_t(kStretches); ++s) start[s] += start[s - 1];
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t k = 0; k < n; ++k) order[size_t(next[size_t(ids[k] / per)]++)] = k;
  parallel_for(kStretches, 1, threads, [&](int64_t begin, int64_t end) {
    const int64_t stop = start[size_t(end)];
    for (int64_t at = start[size_t(begin)]; at < stop; ++at) {
      if (at + kAhead < stop) {
        const int64_t soon = order[size_t(at + kAhead)];
        __builtin_prefetch(out + ids[soon] * width, 1);
        __builtin_prefetch(rows + soon * width);
      }
      const int64_t k = order[size_t(at)];
      add_row(out + ids[k] * width, rows + k * width, width);
    }
  });
}

}  // namespace

// The position of the first id outside the rows, or -1 and the rows are in out.
int64_t gather_rows PH_POOLED_ARGS {
  const int64_t bad = first_bad(ids, n, num_first + num_second, int(threads));
  if (bad >= 0) return bad;
#define PH_RUN(T)                                                                                            \
  gather_from(static_cast<const T*>(values), num_first, static_cast<const T*>(second), width, ids, n,         \
              static_cast<const Sum<T>*>(scale), static_cast<Sum<T>*>(out), int(threads))
  if (type == 3) {
    PH_RUN(int8_t);
  } else if (type == 4) {
    PH_RUN(uint8_t);
  } else {
    PH_ROW_TYPES(type, PH_RUN(T))
  }
  return -1;
}

// The position of the first id outside the target rows (nothing is added then), or -1.
int64_t scatter_add_rows PH_SCATTER_ARGS {
  const int64_t bad = first_bad(ids, n, num_rows, int(threads));
  if (bad >= 0) return bad;
  PH_ROW_TYPES(type, scatter(static_cast<T*>(out), num_rows, ids, n, static_cast<const T*>(rows), width, int(threads)))
  return -1;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_gather_rows PH_GATHER_ARGS {
  return PH_PICK(gather_rows)(values, num_rows, nullptr, 0, type, width, ids, n, scale, out, threads);
}
PH_EXPORT int64_t ph_gather_pooled PH_POOLED_ARGS {
  return PH_PICK(gather_rows)(values, num_first, second, num_second, type, width, ids, n, scale, out, threads);
}
PH_EXPORT int64_t ph_scatter_add_rows PH_SCATTER_ARGS {
  return PH_PICK(scatter_add_rows)(out, type, num_rows, ids, n, rows, width, threads);
}
#endif
