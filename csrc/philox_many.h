// Philox4x32-10 for many counters at once: 64-bit lanes, so that the 32 x 32 -> 64 product is one instruction and its
// upper half needs no shuffle (the multiply ignores what a lane's upper half holds). Equal to philox.h word for word.
#pragma once
#include "philox.h"
#include "simd.h"

namespace polyhop {
namespace PH_ISA {

#if defined(__AVX512F__)
using Lanes64 = __m512i;
inline Lanes64 set1(uint64_t v) { return _mm512_set1_epi64(int64_t(v)); }
inline Lanes64 mul32(Lanes64 a, Lanes64 b) { return _mm512_mul_epu32(a, b); }
inline Lanes64 upper(Lanes64 a) { return _mm512_srli_epi64(a, 32); }
inline Lanes64 lift(Lanes64 a) { return _mm512_slli_epi64(a, 32); }
inline Lanes64 load64(const uint64_t* p) { return _mm512_loadu_si512(p); }
inline void store_words(uint32_t* out, Lanes64 w01, Lanes64 w23) {  // counter k's four words at out[4 k]
  const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi64(w01, low, w23));
  _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi64(w01, high, w23));
}
#define PH_LANES64 8
#elif defined(__AVX2__)
using Lanes64 = __m256i;
inline Lanes64 set1(uint64_t v) { return _mm256_set1_epi64x(int64_t(v)); }
inline Lanes64 mul32(Lanes64 a, Lanes64 b) { return _mm256_mul_epu32(a, b); }
inline Lanes64 upper(Lanes64 a) { return _mm256_srli_epi64(a, 32); }
inline Lanes64 lift(Lanes64 a) { return _mm256_slli_epi64(a, 32); }
inline Lanes64 load64(const uint64_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_words(uint32_t* out, Lanes64 w01, Lanes64 w23) {
  const __m256i even = _mm256_unpacklo_epi64(w01, w23), odd = _mm256_unpackhi_epi64(w01, w23);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8), _mm256_permute2x128_si256(even, odd, 0x31));
}
#define PH_LANES64 4
#elif defined(__SSE2__)
using Lanes64 = __m128i;
inline Lanes64 set1(uint64_t v) { return _mm_set1_epi64x(int64_t(v)); }
inline Lanes64 mul32(Lanes64 a, Lanes64 b) { return _mm_mul_epu32(a, b); }
inline Lanes64 upper(Lanes64 a) { return _mm_srli_epi64(a, 32); }
inline Lanes64 lift(Lanes64 a) { return _mm_slli_epi64(a, 32); }
inline Lanes64 load64(const uint64_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline void store_words(uint32_t* out, Lanes64 w01, Lanes64 w23) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi64(w01, w23));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4), _mm_unpackhi_epi64(w01, w23));
}
#define PH_LANES64 2
#else
#define PH_LANES64 0
#endif

// out[4 k .. 4 k + 3] = philox(key, id[k], other[k]) for k < n.
inline void philox_many(uint64_t key, const uint64_t* id, const uint64_t* other, int n, uint32_t* out) {
  int k = 0;
#if PH_LANES64 > 0
  const Lanes64 m0 = set1(kPhiloxM0), m1 = set1(kPhiloxM1), low = set1(0xFFFFFFFFu);
  for (; k + PH_LANES64 <= n; k += PH_LANES64) {
    Lanes64 c0 = load64(id + k), c1 = upper(c0), c2 = load64(other + k), c3 = upper(c2);
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const Lanes64 p0 = mul32(m0, c0), p1 = mul32(m1, c2);
      c0 = upper(p1) ^ c1 ^ set1(k0);
      c2 = upper(p0) ^ c3 ^ set1(k1);
      c1 = p1;
      c3 = p0;
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
    store_words(out + 4 * k, (c0 & low) | lift(c1), (c2 & low) | lift(c3));
  }
#endif
  for (; k < n; ++k) {
    const Words4 words = philox(key, id[k], other[k]);
    std::memcpy(out + 4 * int64_t(k), words.w, sizeof words.w);
  }
}

// The 16-bit lane l of a counter's four words: word l / 2, low half first.
inline uint32_t lane16(const uint32_t* words, int l) { return (words[l >> 1] >> (16 * (l & 1))) & 0xFFFF; }

}  // namespace PH_ISA
}  // namespace polyhop
