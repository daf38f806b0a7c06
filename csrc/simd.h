// Vectors of the widest registers of this build, as GCC vector extensions: the same source for every instruction set.
//
// Lanes are always columns (or a fixed number of partial sums, Lanes16), never a set that depends on the register width,
// and products are never contracted into fused operations: so every instruction set gives the same bits.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns inside its own AVX-512 header
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace polyhop {

struct bf16 {
  uint16_t bits;
};

}  // namespace polyhop

namespace polyhop {
namespace PH_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// The type in which rows of T are summed.
template <class T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};
template <class T>
using Sum = typename SumOf<T>::type;

// N values of A; Vec<A> fills a register.
template <class A, int N>
struct ShortVecOf {
  typedef A type __attribute__((vector_size(N * sizeof(A))));
};
template <class A, int N>
using ShortVec = typename ShortVecOf<A, N>::type;
template <class A>
using Vec = ShortVec<A, kVectorBytes / int(sizeof(A))>;
template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(Sum<T>));

inline float to_sum(float v) { return v; }
inline double to_sum(double v) { return v; }
inline float to_sum(bf16 v) {
  const uint32_t wide = uint32_t(v.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline float to_sum(int8_t v) { return float(v); }
inline float to_sum(uint8_t v) { return float(v); }

inline void put(float* at, float v) { *at = v; }
inline void put(double* at, double v) { *at = v; }
inline void put(bf16* at, float v) {  // to nearest, ties to even, as torch rounds
  uint32_t wide;
  std::memcpy(&wide, &v, 4);
  at->bits = v != v ? 0x7FC0 : uint16_t((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
}

template <int N>
inline ShortVec<float, N> load_n(const float* at) {
  ShortVec<float, N> v;
  std::memcpy(&v, at, sizeof v);
  return v;
}
template <int N>
inline ShortVec<double, N> load_n(const double* at) {
  ShortVec<double, N> v;
  std::memcpy(&v, at, sizeof v);
  return v;
}
template <int N>
inline ShortVec<float, N> load_n(const bf16* at) {
  ShortVec<uint16_t, N> narrow;
  std::memcpy(&narrow, at, sizeof narrow);
  const auto wide = __builtin_convertvector(narrow, ShortVec<uint32_t, N>) << 16;
  ShortVec<float, N> v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

template <int N>
inline void store_n(float* at, ShortVec<float, N> v) {
  std::memcpy(at, &v, sizeof v);
}
template <int N>
inline void store_n(double* at, ShortVec<double, N> v) {
  std::memcpy(at, &v, sizeof v);
}
template <int N>
inline void store_n(bf16* at, ShortVec<float, N> v) {
  using Wide = ShortVec<uint32_t, N>;
  Wide wide;
  std::memcpy(&wide, &v, sizeof v);
  const Wide rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
  const Wide is_nan = (Wide)(v != v);
  const auto narrow = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7FC0), ShortVec<uint16_t, N>);
  std::memcpy(at, &narrow, sizeof narrow);
}

template <class T>
inline Vec<Sum<T>> load(const T* at) {
  return load_n<kLanes<T>>(at);
}
template <class T>
inline void store(T* at, Vec<Sum<T>> v) {
  store_n<kLanes<T>>(at, v);
}

// The first n < lanes values; the other lanes are 0 and their memory is not touched.
template <class T>
inline Vec<Sum<T>> load_part(const T* at, int n) {
  Sum<T> wide[kLanes<T>] = {};
  for (int i = 0; i < n; ++i) wide[i] = to_sum(at[i]);
  Vec<Sum<T>> v;
  std::memcpy(&v, wide, sizeof v);
  return v;
}
template <class T>
inline void store_part(T* at, Vec<Sum<T>> v, int n) {
  for (int i = 0; i < n; ++i) put(at + i, Sum<T>(v[i]));
}
#if defined(__AVX512F__)
template <>
inline Vec<float> load_part(const float* at, int n) {
  return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), at);
}
template <>
inline Vec<double> load_part(const double* at, int n) {
  return (Vec<double>)_mm512_maskz_loadu_pd(__mmask8((1u << n) - 1), at);
}
template <>
inline void store_part(float* at, Vec<float> v, int n) {
  _mm512_mask_storeu_ps(at, __mmask16((1u << n) - 1), (__m512)v);
}
#elif defined(__AVX2__)
inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
template <>
inline Vec<float> load_part(const float* at, int n) {
  return (Vec<float>)_mm256_maskload_ps(at, first_lanes(n));
}
template <>
inline void store_part(float* at, Vec<float> v, int n) {
  _mm256_maskstore_ps(at, first_lanes(n), (__m256)v);
}
#endif

// Asks for a row that is read soon. Into the second level cache: it has more requests in flight than the first, and with
// whole rows asked for that gave 14 GB/s where the first level gave 8 (Zen 4, one core, rows of 128 and 256 floats out of
// 490k, 50 uses each).
inline void prefetch(const void* row, int lines) {
  for (int line = 0; line < lines; ++line) __builtin_prefetch(static_cast<const char*>(row) + 64 * line, 0, 2);
}
inline int lines_of(int64_t bytes) { return int((bytes + 63) / 64); }
// How many rows ahead to ask: measured best is 32 for one line, 24 for 4 and 8, 16 for 16 lines.
constexpr int64_t rows_ahead(int lines) { return lines >= 16 ? 16 : 32 - lines; }

// Sixteen partial sums (eight for double), whatever the register width: dot products round alike everywhere.
template <class A>
struct Partial {
  static constexpr int kSums = 64 / int(sizeof(A));
  static constexpr int kParts = 64 / kVectorBytes;
  static constexpr int kWide = kVectorBytes / int(sizeof(A));
  Vec<A> part[kParts];

  // Always sums i and i + half, halves of 8, 4, 2, 1 (4, 2, 1 for double).
  A total() const {
    Vec<A> folded[kParts];
    for (int p = 0; p < kParts; ++p) folded[p] = part[p];
    for (int half = kParts / 2; half > 0; half /= 2)
      for (int p = 0; p < half; ++p) folded[p] += folded[p + half];
    return fold<kVectorBytes>(folded[0]);
  }

 private:
  template <int Bytes, class V>
  static A fold(V v) {
    if constexpr (Bytes == sizeof(A)) {
      return v[0];
    } else if constexpr (Bytes == 2 * sizeof(A)) {
      return v[0] + v[1];
    } else {
      typedef A Half __attribute__((vector_size(Bytes / 2)));
      Half halves[2];
      std::memcpy(halves, &v, sizeof halves);
      return fold<Bytes / 2>(Half(halves[0] + halves[1]));
    }
  }
};

// <a, b> over n values.
template <class T>
inline Sum<T> dot(const T* a, const T* b, int64_t n) {
  using A = Sum<T>;
  using P = Partial<A>;
  P sum = {};
  int64_t c = 0;
  for (; c + P::kSums <= n; c += P::kSums)
    for (int p = 0; p < P::kParts; ++p) sum.part[p] += load(a + c + p * P::kWide) * load(b + c + p * P::kWide);
  for (int p = 0; p < P::kParts && c < n; ++p, c += P::kWide) {
    const int left = int(n - c);
    if (left >= P::kWide)
      sum.part[p] += load(a + c) * load(b + c);
    else
      sum.part[p] += load_part(a + c, left) * load_part(b + c, left);
  }
  return sum.total();
}

// to += factor * from over n values.
template <class T>
inline void add_scaled(Sum<T>* to, Sum<T> factor, const T* from, int64_t n) {
  constexpr int L = kLanes<T>;
  int64_t c = 0;
  for (; c + L <= n; c += L) store(to + c, load(to + c) + factor * load(from + c));
  if (c < n) {
    const int left = int(n - c);
    store_part(to + c, load_part(to + c, left) + factor * load_part(from + c, left), left);
  }
}

}  // namespace PH_ISA
}  // namespace polyhop

// Calls body with `T` bound to the row type of a dtype code (0 = float32, 1 = float64, 2 = bfloat16).
#define PH_ROW_TYPES(code, ...)            \
  switch (code) {                          \
    case 0: {                              \
      using T = float;                     \
      __VA_ARGS__;                         \
      break;                               \
    }                                      \
    case 1: {                              \
      using T = double;                    \
      __VA_ARGS__;                         \
      break;                               \
    }                                      \
    case 2: {                              \
      using T = polyhop::bf16;             \
      __VA_ARGS__;                         \
      break;                               \
    }                                      \
    default:                               \
      break;                               \
  }
