// The numbers of sources in LABOR, where mini-batches that follow each other depend on each other.
//
// Between two keys a source's number turns from one to the other: u = Phi(near n(z1) + far n(z2)) with near^2 + far^2 = 1, z1
// and z2 its words under the keys, n the normal quantile, Phi the normal distribution. Each u is uniform, neighbours on the
// way are alike. n is Wichura's AS 241, Phi is Hart's 5666 (both about 1e-15); log and exp are written out, so that every
// compiler, instruction set and the reference in plain torch give the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace polyhop {

// Which numbers; far = 0: the words under `first`, as they are.
struct Variates {
  uint64_t first, second;
  double near, far;
};

namespace PH_ISA {
namespace {  // nothing here is shared with other files or other instruction sets

// Natural logarithm of 2^-1022 <= x < 1: 2 artanh((m - 1) / (m + 1)) of the mantissa, which is brought to 0.7 .. 1.4.
inline double log_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  int32_t power = int32_t(bits >> 52) - 1023;
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  std::memcpy(&m, &bits, 8);
  const bool large = m > 1.4142135623730951;
  m = large ? m * 0.5 : m;
  power = large ? power + 1 : power;
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double y = 1.0 / 21.0;
  y = y * z + 1.0 / 19.0;
  y = y * z + 1.0 / 17.0;
  y = y * z + 1.0 / 15.0;
  y = y * z + 1.0 / 13.0;
  y = y * z + 1.0 / 11.0;
  y = y * z + 1.0 / 9.0;
  y = y * z + 1.0 / 7.0;
  y = y * z + 1.0 / 5.0;
  y = y * z + 1.0 / 3.0;
  y = y * z + 1.0;
  return double(power) * 0.6931471805599453 + (s + s) * y;
}

// exp(-x) of 0 <= x <= 700.
inline double exp_of_minus(double x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
  const double n = (x * 1.4426950408889634 + kMagic) - kMagic;
  const double r = (n * 0.693147180369123816490 - x) + n * 1.90821492927058770002e-10;
  double y = 1.0 / 6227020800.0;
  y = y * r + 1.0 / 479001600.0;
  y = y * r + 1.0 / 39916800.0;
  y = y * r + 1.0 / 3628800.0;
  y = y * r + 1.0 / 362880.0;
  y = y * r + 1.0 / 40320.0;
  y = y * r + 1.0 / 5040.0;
  y = y * r + 1.0 / 720.0;
  y = y * r + 1.0 / 120.0;
  y = y * r + 1.0 / 24.0;
  y = y * r + 1.0 / 6.0;
  y = y * r + 0.5;
  y = y * r + 1.0;
  y = y * r + 1.0;
  const uint64_t bits = uint64_t(1023 - int32_t(n)) << 52;
  double power;
  std::memcpy(&power, &bits, 8);
  return y * power;
}

// The normal quantile of 1e-11 < p < 1 - 1e-11. Both pieces are computed: then it runs in vectors.
inline double normal_quantile(double p) {
  const double q = p - 0.5, a = 0.180625 - q * q;
  double top = a * 2.5090809287301226727e3 + 3.3430575583588128105e4;
  top = top * a + 6.7265770927008700853e4;
  top = top * a + 4.5921953931549871457e4;
  top = top * a + 1.3731693765509461125e4;
  top = top * a + 1.9715909503065514427e3;
  top = top * a + 1.3314166789178437745e2;
  top = top * a + 3.3871328727963666080e0;
  double low = a * 5.2264952788528545610e3 + 2.8729085735721942674e4;
  low = low * a + 3.9307895800092710610e4;
  low = low * a + 2.1213794301586595867e4;
  low = low * a + 5.3941960214247511077e3;
  low = low * a + 6.8718700749205790830e2;
  low = low * a + 4.2313330701600911252e1;
  low = low * a + 1.0;
  const double centre = q * top / low;
  const double b = std::sqrt(-log_of(q < 0.0 ? p : 1.0 - p)) - 1.6;
  top = b * 7.74545014278341407640e-4 + 2.27238449892691845833e-2;
  top = top * b + 2.41780725177450611770e-1;
  top = top * b + 1.27045825245236838258e0;
  top = top * b + 3.64784832476320460504e0;
  top = top * b + 5.76949722146069140550e0;
  top = top * b + 4.63033784615654529590e0;
  top = top * b + 1.42343711074968357734e0;
  low = b * 1.05075007164441684324e-9 + 5.47593808499534494600e-4;
  low = low * b + 1.51986665636164571966e-2;
  low = low * b + 1.48103976427480074590e-1;
  low = low * b + 6.89767334985100004550e-1;
  low = low * b + 1.67638483018380384940e0;
  low = low * b + 2.05319162663775882187e0;
  low = low * b + 1.0;
  const double tail = top / low;
  const double outer = q < 0.0 ? -tail : tail;
  return std::fabs(q) <= 0.425 ? centre : outer;
}

// The share of a normal distribution below x; |x| is taken as 7 at most, beyond which 32 bits have nothing left.
inline double normal_share(double x) {
  const double whole = std::fabs(x), t = whole > 7.0 ? 7.0 : whole;
  double top = t * 3.52624965998911e-02 + 0.700383064443688;
  top = top * t + 6.37396220353165;
  top = top * t + 33.912866078383;
  top = top * t + 112.079291497871;
  top = top * t + 221.213596169931;
  top = top * t + 220.206867912376;
  double low = t * 8.83883476483184e-02 + 1.75566716318264;
  low = low * t + 16.064177579207;
  low = low * t + 86.7807322029461;
  low = low * t + 296.564248779674;
  low = low * t + 637.333633378831;
  low = low * t + 793.826512519948;
  low = low * t + 440.413735824752;
  const double beyond = exp_of_minus(t * t * 0.5) * top / low;
  return x > 0.0 ? 1.0 - beyond : beyond;
}

inline double quantile_of_word(uint32_t word) { return normal_quantile((double(word) + 0.5) * 0x1p-32); }

// out[i]: the number of a source whose words are a[i] and b[i].
inline void turned_numbers(const Variates& v, const uint32_t* a, const uint32_t* b, int64_t n, uint32_t* out) {
  constexpr double kMagic = 4503599627370496.0;  // 2^52: a whole number is in the low bits then
  for (int64_t i = 0; i < n; ++i) {
    const double x = v.near * quantile_of_word(a[i]) + v.far * quantile_of_word(b[i]);
    const double number = normal_share(x) * 4294967295.0 + kMagic;
    uint64_t bits;
    std::memcpy(&bits, &number, 8);
    out[i] = uint32_t(bits);
  }
}

// What a source's number is at least, by the first bits of its two words: most sources are dropped by this alone.
class LeastNumbers {
 public:
  static constexpr int kBits = 10, kBins = 1 << kBits;

  explicit LeastNumbers(const Variates& v) {
    static const Table table;
    for (int bin = 0; bin < kBins; ++bin) {
      first_[bin] = float(v.near * table.least[bin]);
      second_[bin] = float(v.far * table.least[bin]);
    }
  }

  // What near n(z1) + far n(z2) is at most, and a little, for a number of at most `bound`.
  static float most(uint32_t bound) {
    return float(normal_quantile(std::fmin((double(bound) + 8.0) * 0x1p-32, 1 - 1e-9))) + 1e-4f;
  }
  float least(uint32_t a, uint32_t b) const { return first_[a >> (32 - kBits)] + second_[b >> (32 - kBits)]; }

 private:
  struct Table {
    double least[kBins];
    Table() {
      for (int bin = 0; bin < kBins; ++bin) least[bin] = quantile_of_word(uint32_t(bin) << (32 - kBits));
    }
  };
  float first_[kBins], second_[kBins];
};

}  // namespace
}  // namespace PH_ISA
}  // namespace polyhop
