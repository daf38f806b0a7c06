// Keyed dropout. Column c of the row with id g is kept iff 16-bit lane c % 8 of philox(key, g, c / 8) is at least the
// threshold; kept values grow by 65536 / (65536 - threshold). Masks live in a small buffer and are never stored.
#include <algorithm>

#include "isa.h"
#include "philox_many.h"
#include "ranges.h"
#include "simd.h"

#define PH_DROP_ARGS                                                                                                \
  (const void* h, int64_t type, int64_t rows, int64_t width, const int64_t* ids, int64_t id_start, int64_t key,      \
   int64_t limit, int64_t relu, void* out, int64_t threads)
#define PH_BACK_ARGS \
  (const void* grad, const void* out, int64_t type, int64_t n, int64_t limit, void* result, int64_t threads)
#define PH_VALUES_ARGS                                                                                               \
  (const void* values, int64_t type, const int64_t* indptr, const void* columns, int64_t wide, int64_t rows,          \
   const int64_t* ids, int64_t key, int64_t limit, void* out, int64_t threads)

PH_DECLARE(int64_t, dropout, PH_DROP_ARGS)
PH_DECLARE(int64_t, dropout_relu_backward, PH_BACK_ARGS)
PH_DECLARE(int64_t, dropout_values, PH_VALUES_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kBatch = 64;      // counters drawn at a time: 512 lanes, 1 KiB of words
constexpr int64_t kGrain = 1 << 15;  // elements per range

template <class A>
A kept_scale(int64_t limit) {
  return A(65536.0 / double(65536 - limit));
}

// One stretch of n elements against its 16-bit lanes.
template <class T, bool Relu>
void apply(const T* from, const uint16_t* lanes, int64_t n, uint16_t limit, Sum<T> scale, T* to) {
  using A = Sum<T>;
  for (int64_t i = 0; i < n; ++i) {
    A v = to_sum(from[i]);
    if (Relu) v = v < A(0) ? A(0) : v;
    put(to + i, lanes[i] >= limit ? v * scale : A(0));
  }
}

template <class T, bool Relu>
void drop(const T* h, int64_t rows, int64_t width, const int64_t* ids, int64_t id_start, uint64_t key, int64_t limit,
          T* out, int threads) {
  if (width == 0) return;
  const int64_t blocks = (width + 7) / 8;
  const Sum<T> scale = kept_scale<Sum<T>>(limit);
  parallel_for(rows, std::max<int64_t>(1, kGrain / width), threads, [&](int64_t begin, int64_t end) {
    uint64_t id[kBatch], block[kBatch];
    alignas(64) uint32_t words[4 * kBatch];
    uint16_t lanes[8 * kBatch + 8];
    int64_t row = begin, at = 0;  // the next counter: block `at` of row `row`
    while (row < end) {
      const int64_t first_row = row, first_at = at;
      int64_t count = 0;
      for (; count < kBatch && row < end; ++count) {
        id[count] = uint64_t(ids ? ids[row] : id_start + row);
        block[count] = uint64_t(at);
        if (++at == blocks) at = 0, ++row;
      }
      philox_many(key, id, block, int(count), words);
      // Little-endian: a counter's words are its 8 lanes in column order. Lanes behind the last column are left out, so that
      // the rest lies side by side like the elements.
      int64_t n = 0;
      for (int64_t k = 0; k < count; ++k) {
        std::memcpy(lanes + n, words + 4 * k, 16);
        n += std::min<int64_t>(8, width - 8 * int64_t(block[k]));
      }
      const int64_t start = first_row * width + 8 * first_at;
      apply<T, Relu>(h + start, lanes, n, uint16_t(limit), scale, out + start);
    }
  });
}

template <class T>
void relu_backward(const T* grad, const T* out, int64_t n, int64_t limit, T* result, int threads) {
  using A = Sum<T>;
  const A scale = kept_scale<A>(limit);
  parallel_for(n, kGrain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      put(result + i, to_sum(out[i]) <= A(0) ? A(0) : to_sum(grad[i]) * scale);
  });
}

template <class T, class I>
void drop_values(const T* values, const int64_t* indptr, const I* columns, int64_t rows, const int64_t* ids,
                 uint64_t key, int64_t limit, T* out, int threads) {
  using A = Sum<T>;
  const A scale = kept_scale<A>(limit);
  for_rows(indptr, rows, kGrain / 8, threads, [&](int64_t begin, int64_t end) {
    uint64_t id[kBatch], block[kBatch];
    uint32_t words[4 * kBatch];
    int64_t row = begin;
    for (int64_t e = indptr[begin]; e < indptr[end]; e += kBatch) {
      const int64_t count = std::min(kBatch, indptr[end] - e);
      for (int64_t k = 0; k < count; ++k) {
        while (indptr[row + 1] <= e + k) ++row;
        id[k] = uint64_t(ids ? ids[row] : row);
        block[k] = uint64_t(columns[e + k]) >> 3;
      }
      philox_many(key, id, block, int(count), words);
      for (int64_t k = 0; k < count; ++k) {
        const bool kept = lane16(words + 4 * k, int(columns[e + k] & 7)) >= uint32_t(limit);
        put(out + e + k, kept ? to_sum(values[e + k]) * scale : A(0));
      }
    }
  });
}

}  // namespace

int64_t dropout PH_DROP_ARGS {
  PH_ROW_TYPES(type, const auto run = relu ? &drop<T, true> : &drop<T, false>;
               run(static_cast<const T*>(h), rows, width, ids, id_start, uint64_t(key), limit, static_cast<T*>(out),
                   int(threads)))
  return 0;
}

int64_t dropout_relu_backward PH_BACK_ARGS {
  PH_ROW_TYPES(type, relu_backward(static_cast<const T*>(grad), static_cast<const T*>(out), n, limit,
                                   static_cast<T*>(result), int(threads)))
  return 0;
}

int64_t dropout_values PH_VALUES_ARGS {
  if (wide) {
    PH_ROW_TYPES(type, drop_values(static_cast<const T*>(values), indptr, static_cast<const int64_t*>(columns), rows,
                                   ids, uint64_t(key), limit, static_cast<T*>(out), int(threads)))
  } else {
    PH_ROW_TYPES(type, drop_values(static_cast<const T*>(values), indptr, static_cast<const int32_t*>(columns), rows,
                                   ids, uint64_t(key), limit, static_cast<T*>(out), int(threads)))
  }
  return 0;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_dropout PH_DROP_ARGS {
  return PH_PICK(dropout)(h, type, rows, width, ids, id_start, key, limit, relu, out, threads);
}
PH_EXPORT int64_t ph_dropout_relu_backward PH_BACK_ARGS {
  return PH_PICK(dropout_relu_backward)(grad, out, type, n, limit, result, threads);
}
PH_EXPORT int64_t ph_dropout_values PH_VALUES_ARGS {
  return PH_PICK(dropout_values)(values, type, indptr, columns, wide, rows, ids, key, limit, out, threads);
}
#endif
