// exp over an array, the same bits for every instruction set.
#pragma once
#include <cmath>

#include "simd.h"

namespace polyhop {
namespace PH_ISA {

// Cephes' expf: 2^n times a polynomial in what is left of x, within 2 units in the last place; 0 below the normal range.
inline Vec<float> exp_of(Vec<float> x) {
  typedef int32_t VecI32 __attribute__((vector_size(kVectorBytes)));
  const Vec<float> zero = {};
  const Vec<float> magic = 12582912.0f - zero;  // 1.5 * 2^23: adding it rounds to a whole number
  const Vec<float> shifted = x * 1.44269504088896341f + magic;
  const Vec<float> n = shifted - magic;
  const Vec<float> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec<float> y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  VecI32 bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const VecI32 power_bits = (bits - 0x4B400000 + 127) << 23;
  Vec<float> power;
  std::memcpy(&power, &power_bits, sizeof power);
  const Vec<float> result = y * power;
  return x < -87.0f ? zero : result;
}

// In place, for x <= 0 (scores less their maximum).
inline void exp_all(float* x, int64_t n) {
  constexpr int L = kLanes<float>;
  int64_t i = 0;
  for (; i + L <= n; i += L) store(x + i, exp_of(load(x + i)));
  if (i < n) store_part(x + i, exp_of(load_part(x + i, int(n - i))), int(n - i));
}
inline void exp_all(double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = std::exp(x[i]);
}

}  // namespace PH_ISA
}  // namespace polyhop
