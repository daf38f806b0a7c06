// Rows as few bits: stochastic rounding to 2^b levels between a row's smallest and largest value, and back.
//
// A message holds rows of mixed widths b in {1, 2, 4, 8, 16, 32}:
//
//   codes   row after row, ceil(F b / 8) bytes each; code c in bits [c b, (c + 1) b), low end first, padding bits 0.
//           16 = bfloat16 to nearest, 32 = float32: passed through, without parameters
//   zeros   bfloat16 of every row with b <= 8, in row order
//   steps   bfloat16 of the same rows
//
// Parameters first, so that both ends use the same: zero = min rounded down to bfloat16, step = (max - zero) / (2^b - 1)
// rounded up. Then t = (h - zero) / step as fixed point with 16 bits behind the point (to nearest), and
// code = (t + lane) >> 16 with lane = 16-bit lane c % 8 of philox(key, ids[r], c / 8). Given t, that rounds up with exactly
// its fraction's probability; a value on a level keeps its code always. What bias is left is that of t: half a lane (2^-17 of
// a step, of either sign) and float32's rounding, never the sum of a large code and a small random number in one float.
//
// A constant row is exact: its float32 bits travel as zero = upper half, step = sign bit and bits 15 .. 1, lowest bit of the
// first code byte = bit 0 (other code bits 0). No step of another row has the sign bit.
//
// Steps are at least 2^-110, so that 65536 / step is a float: rows that span less are rounded in steps of that, without bias.
// Values of rows below 32 bits are below 2^126 in magnitude, so that no difference and no decoded value overflows. What is
// larger, infinite or NaN is not encoded: the place of the first such row is returned.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>
#include <vector>

#include "isa.h"
#include "philox_many.h"
#include "pool.h"
#include "simd.h"

#define PH_SIZE_ARGS (const uint8_t* bits, int64_t k, int64_t width, int64_t* where)
#define PH_ENCODE_ARGS                                                                                                \
  (const void* h, int64_t type, int64_t num_rows, int64_t width, const int64_t* rows, const int64_t* ids,              \
   const uint8_t* bits, int64_t k, int64_t key, uint8_t* out, float* spans, int64_t threads)
#define PH_DECODE_ARGS \
  (const uint8_t* data, const uint8_t* bits, int64_t k, int64_t width, void* out, int64_t type, int64_t threads)

PH_DECLARE(int64_t, quantised_bytes, PH_SIZE_ARGS)
PH_DECLARE(int64_t, quantise_rows, PH_ENCODE_ARGS)
PH_DECLARE(int64_t, dequantise_rows, PH_DECODE_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kGrain = 1 << 15;   // elements per range
constexpr int64_t kBlocks = 256;      // counters drawn at a time: 2048 lanes, 4 KiB, beside 8 KiB of rows
constexpr int64_t kMostRows = 32;     // rows worked on at a time, so that their chains of instructions overlap
constexpr int64_t kPiece = 64;        // columns packed at a time
constexpr float kLimit = 0x1p126f;    // bound of values below 32 bits
constexpr float kSmallest = 0x1p-110f;  // of all steps
constexpr int kWide = kVectorBytes / 4;
using Floats = ShortVec<float, kWide>;
using Whole = ShortVec<uint32_t, kWide>;

inline uint32_t bits_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

// ---- places in a message

struct Place {
  int64_t codes, params;  // bytes before, rows with parameters before
};

inline int64_t row_bytes(int64_t width, int64_t bits) { return (width * bits + 7) / 8; }

// Where each range of `grain` rows begins, and the end.
std::vector<Place> places(const uint8_t* bits, int64_t k, int64_t width, int64_t grain) {
  int64_t bytes[33] = {}, params[33] = {};
  for (const int b : {1, 2, 4, 8, 16, 32}) bytes[b] = row_bytes(width, b), params[b] = b <= 8;
  std::vector<Place> found;
  Place at = {0, 0};
  for (int64_t r = 0; r < k; ++r) {
    if (r % grain == 0) found.push_back(at);
    at.codes += bytes[bits[r]];
    at.params += params[bits[r]];
  }
  found.push_back(at);
  return found;
}

inline int64_t rows_per_range(int64_t width) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)); }

// The first of all positions noted, or -1.
class First {
 public:
  void note(int64_t at) {
    int64_t known = found_.load();
    while (at < known && !found_.compare_exchange_weak(known, at)) {
    }
  }
  int64_t get() const { return found_.load() == INT64_MAX ? -1 : found_.load(); }

 private:
  std::atomic<int64_t> found_{INT64_MAX};
};

// ---- vectors of floats, whatever the rows' type

inline Floats floats(const float* at) { return load_n<kWide>(at); }
inline Floats floats(const bf16* at) { return load_n<kWide>(at); }
inline Floats floats(const double* at) {
  ShortVec<double, kWide> wide;
  std::memcpy(&wide, at, sizeof wide);
  return __builtin_convertvector(wide, Floats);
}

inline void put_floats(float* at, Floats v) { store_n<kWide>(at, v); }
inline void put_floats(bf16* at, Floats v) { store_n<kWide>(at, v); }
inline void put_floats(double* at, Floats v) {
  using Doubles = ShortVec<double, kWide>;
  const Doubles wide = __builtin_convertvector(v, Doubles);
  std::memcpy(at, &wide, sizeof wide);
}

#if defined(__AVX512F__)
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Whole to_nearest(Floats v) { return (Whole)_mm512_cvtps_epi32((__m512)v); }
inline void put_bytes(uint8_t* at, Whole v) {  // each at most 255
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8((__m512i)v));
}
#elif defined(__AVX2__)
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline Whole to_nearest(Floats v) { return (Whole)_mm256_cvtps_epi32((__m256)v); }
inline void put_bytes(uint8_t* at, Whole v) {
  const __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
  const __m128i halves = _mm_packs_epi32(low, high);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(at), _mm_packus_epi16(halves, halves));
}
#elif defined(__SSE2__)
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm_min_ps((__m128)a, (__m128)b); }
inline Floats larger(Floats a, Floats b) { return (Floats)_mm_max_ps((__m128)a, (__m128)b); }
inline Whole to_nearest(Floats v) { return (Whole)_mm_cvtps_epi32((__m128)v); }
inline void put_bytes(uint8_t* at, Whole v) {
  const __m128i halves = _mm_packs_epi32((__m128i)v, (__m128i)v);
  const int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(halves, halves));
  std::memcpy(at, &bytes, 4);
}
#else
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Whole to_nearest(Floats v) {
  Whole out;
  for (int i = 0; i < kWide; ++i) out[i] = uint32_t(lrintf(v[i]));
  return out;
}
inline void put_bytes(uint8_t* at, Whole v) {
  for (int i = 0; i < kWide; ++i) at[i] = uint8_t(v[i]);
}
#endif

// All N values as one: halves together, until there is one.
template <int N, class Op>
inline float fold(ShortVec<float, N> v, const Op& op) {
  if constexpr (N == 2) {
    return op(float(v[0]), float(v[1]));
  } else {
    ShortVec<float, N / 2> halves[2];
    std::memcpy(halves, &v, sizeof v);
    return fold<N / 2>(ShortVec<float, N / 2>(op(halves[0], halves[1])), op);
  }
}

// ---- one row

struct Span {
  float low, high;
  bool is_finite;
};

template <class T>
inline Span span(const T* from, int64_t width) {
  if (width < kWide) {
    Span s = {0, 0, true};
    for (int64_t c = 0; c < width; ++c) {
      const float v = float(to_sum(from[c]));
      s.low = c && s.low < v ? s.low : v;
      s.high = c && s.high > v ? s.high : v;
      s.is_finite &= std::isfinite(v);
    }
    s.low += 0.0f;
    return s;
  }
  Floats low = floats(from), high = low, probe = low * 0.0f;  // the probe is NaN from the first NaN or infinity on
  const auto take = [&](const T* at) {
    const Floats v = floats(at);
    low = smaller(v, low);
    high = larger(v, high);
    probe += v * 0.0f;
  };
  int64_t c = kWide;
  for (; c + kWide <= width; c += kWide) take(from + c);
  if (c < width) take(from + width - kWide);
  const float total = fold<kWide>(probe, [](auto a, auto b) { return a + b; });
  return {fold<kWide>(low, [](auto a, auto b) { return a < b ? a : b; }) + 0.0f,  // the smallest of 0 and -0 is 0
          fold<kWide>(high, [](auto a, auto b) { return a > b ? a : b; }), total == 0.0f};
}

struct Levels {
  uint16_t zero, step;  // as they travel
  float low, scale;     // the zero point, and 65536 / step
};

inline Levels levels_of(const Span& s, int bits) {
  const uint32_t low = bits_of(s.low);
  Levels out;
  out.zero = uint16_t((low >> 31 ? low + 0xFFFF : low) >> 16);  // down: away from 0 if negative
  out.low = float_of(uint32_t(out.zero) << 16);
  const double wanted = (double(s.high) - double(out.low)) / double((1 << bits) - 1);
  float step = float(wanted);
  if (double(step) < wanted) step = float_of(bits_of(step) + 1);
  step = step < kSmallest ? kSmallest : step;
  out.step = uint16_t((bits_of(step) + 0xFFFF) >> 16);
  out.scale = 65536.0f / float_of(uint32_t(out.step) << 16);
  return out;
}

template <int Bits>
inline void pack(const uint8_t* codes, uint8_t* out) {  // kPiece codes, a byte each
  if constexpr (Bits == 8) {
    std::memcpy(out, codes, kPiece);
  } else {
    // A group of 8 / Bits codes as one number: its bytes slide together into the lowest.
    using Word = std::conditional_t<Bits == 4, uint16_t, std::conditional_t<Bits == 2, uint32_t, uint64_t>>;
    constexpr int kWords = int(kPiece / sizeof(Word));
    ShortVec<Word, kWords> words;
    std::memcpy(&words, codes, sizeof words);
    for (int have = Bits, apart = 8; have < 8; have *= 2, apart *= 2) words |= words >> (apart - have);
    const auto bytes = __builtin_convertvector(words & 0xFF, ShortVec<uint8_t, kWords>);
    std::memcpy(out, &bytes, sizeof bytes);
  }
}

template <int Bits>
inline void unpack(const uint8_t* in, uint8_t* codes) {  // kPiece codes, a byte each
  if constexpr (Bits == 8) {
    std::memcpy(codes, in, kPiece);
  } else {
    using Word = std::conditional_t<Bits == 4, uint16_t, std::conditional_t<Bits == 2, uint32_t, uint64_t>>;
    constexpr int kWords = std::max(kVectorBytes, 32) / int(sizeof(Word));  // GCC 12 widens other numbers one by one
    for (int w = 0; w < kPiece / int(sizeof(Word)); w += kWords) {
      ShortVec<uint8_t, kWords> bytes;
      std::memcpy(&bytes, in + w, sizeof bytes);
      auto words = __builtin_convertvector(bytes, ShortVec<Word, kWords>);
      // The lower half of the codes stays, the upper half moves to the middle of the number; then the halves of each half.
      for (int have = 4, apart = 4 * int(sizeof(Word)); have >= Bits; have /= 2, apart /= 2) {
        Word mask = 0;
        for (int at = 0; at < 8 * int(sizeof(Word)); at += apart) mask |= Word((Word(1) << have) - 1) << at;
        words = (words | (words << (apart - have))) & mask;
      }
      std::memcpy(codes + w * int(sizeof(Word)), &words, sizeof words);
    }
  }
}

// kPiece columns to codes.
template <int Bits, class T>
inline void round_piece(const T* from, const uint16_t* lanes, const Levels& levels, uint8_t* out) {
  constexpr int32_t kTop = ((1 << Bits) - 1) << 16;
  using Signed = ShortVec<int32_t, kWide>;
  alignas(64) uint8_t codes[kPiece];
#pragma GCC unroll 4
  for (int c = 0; c < kPiece; c += kWide) {
    Signed fixed = (Signed)to_nearest((floats(from + c) - levels.low) * levels.scale);
    fixed = fixed < kTop ? fixed : kTop - Signed{};
    ShortVec<uint16_t, kWide> lane;
    std::memcpy(&lane, lanes + c, sizeof lane);
    put_bytes(codes + c, ((Whole)fixed + __builtin_convertvector(lane, Whole)) >> 16);
  }
  pack<Bits>(codes, out);
}

// n columns to codes; lanes may be read up to the next multiple of kPiece.
template <int Bits, class T>
void round_row(const T* from, int64_t n, const uint16_t* lanes, const Levels& levels, uint8_t* out) {
  int64_t c = 0;
  for (; c + kPiece <= n; c += kPiece) round_piece<Bits>(from + c, lanes + c, levels, out + c * Bits / 8);
  if (c == n) return;
  float rest[kPiece];
  uint8_t packed[kPiece];
  for (int64_t i = 0; i < kPiece; ++i) rest[i] = c + i < n ? float(to_sum(from[c + i])) : levels.low;  // code 0
  round_piece<Bits>(rest, lanes + c, levels, packed);
  std::memcpy(out + c * Bits / 8, packed, size_t(row_bytes(n - c, Bits)));
}

template <class T>
void round_row(int bits, const T* from, int64_t n, const uint16_t* lanes, const Levels& levels, uint8_t* out) {
  switch (bits) {
    case 1: return round_row<1>(from, n, lanes, levels, out);
    case 2: return round_row<2>(from, n, lanes, levels, out);
    case 4: return round_row<4>(from, n, lanes, levels, out);
    default: return round_row<8>(from, n, lanes, levels, out);
  }
}

// A row as values of type V, at any address.
template <class V, class T>
void pass(const T* from, int64_t width, uint8_t* out) {
  if constexpr (std::is_same_v<V, T>) {
    std::memcpy(out, from, size_t(width) * sizeof(V));
    return;
  }
  V values[kPiece];
  for (int64_t c = 0; c < width; c += kPiece) {
    const int64_t n = std::min(kPiece, width - c);
    for (int64_t i = 0; i < n; ++i) put(values + i, float(to_sum(from[c + i])));
    std::memcpy(out + c * int64_t(sizeof(V)), values, size_t(n) * sizeof(V));
  }
}

// ---- encoding

template <class T>
struct Encoder {
  const T* h;
  int64_t num_rows, width;
  const int64_t *rows, *ids;
  const uint8_t* bits;
  int64_t k;
  uint64_t key;
  uint8_t *codes, *zeros, *steps;
  float* spans;
  First* bad;

  const T* row(int64_t r) const { return h + (rows ? rows[r] : r) * width; }

  // Rows begin .. end - 1, from the given place on.
  void run(int64_t begin, int64_t end, Place at) const {
    const int64_t blocks = (width + 7) / 8;
    const int64_t group = std::clamp<int64_t>(kBlocks / std::max<int64_t>(1, blocks), 1, kMostRows);
    for (int64_t r = begin; r < end; r += group) some(r, std::min(group, end - r), blocks, at);
  }

 private:
  struct Task {  // a row to round
    const T* from;
    uint8_t* out;
    uint64_t id;
    int bits;
    Levels levels;
  };

  void some(int64_t first, int64_t count, int64_t blocks, Place& at) const {
    Span found[kMostRows];
    Task tasks[kMostRows];
    look(first, count, found);
    int num_tasks = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = first + i;
      const int b = bits[r];
      uint8_t* const out = codes + at.codes;
      at.codes += row_bytes(width, b);
      const float limit = b == 32 ? INFINITY : kLimit;
      if (!(found[i].is_finite && found[i].low > -limit && found[i].high < limit)) {
        bad->note(r);
        at.params += b <= 8;
        continue;
      }
      if (spans) spans[r] = found[i].high - found[i].low;
      if (b == 32) {
        pass<float>(row(r), width, out);
      } else if (b == 16) {
        pass<bf16>(row(r), width, out);
      } else if (found[i].low == found[i].high) {
        constant(found[i].low, b, out, at.params++);
      } else {
        Task& task = tasks[num_tasks++];
        task = {row(r), out, uint64_t(ids ? ids[r] : r), b, levels_of(found[i], b)};
        put_params(task.levels.zero, task.levels.step, at.params++);
      }
    }
    round(tasks, num_tasks, blocks);
  }

  void look(int64_t first, int64_t count, Span* found) const {
    const int lines = std::min(32, lines_of(width * int64_t(sizeof(T))));
    const int64_t ahead = rows_ahead(lines);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = first + i;
      if (rows) {
        if (r + ahead < k && uint64_t(rows[r + ahead]) < uint64_t(num_rows)) prefetch(row(r + ahead), lines);
        if (uint64_t(rows[r]) >= uint64_t(num_rows)) {
          found[i] = {0, 0, false};
          continue;
        }
      }
      found[i] = span(row(r), width);
    }
  }

  void put_params(uint16_t zero, uint16_t step, int64_t at) const {
    std::memcpy(zeros + 2 * at, &zero, 2);
    std::memcpy(steps + 2 * at, &step, 2);
  }

  void constant(float value, int b, uint8_t* out, int64_t at) const {
    const uint32_t all = bits_of(value);
    std::memset(out, 0, size_t(row_bytes(width, b)));
    if (width) out[0] = all & 1;
    put_params(uint16_t(all >> 16), uint16_t(0x8000 | (all & 0xFFFF) >> 1), at);
  }

  void round(const Task* tasks, int num_tasks, int64_t blocks) const {
    uint64_t id[kBlocks], block[kBlocks];
    alignas(64) uint32_t words[4 * kBlocks + kPiece / 2];
    if (!num_tasks) return;
    std::memset(words + 4 * kBlocks, 0, kPiece * 2);
    for (int64_t start = 0; start < blocks; start += kBlocks) {  // more than once for a single row only
      const int64_t n = std::min(kBlocks, blocks - start);
      for (int t = 0; t < num_tasks; ++t)
        for (int64_t i = 0; i < n; ++i) id[t * n + i] = tasks[t].id, block[t * n + i] = uint64_t(start + i);
      philox_many(key, id, block, int(num_tasks * n), words);
      // Little-endian: a counter's words are its 8 lanes in column order.
      const uint16_t* const lanes = reinterpret_cast<const uint16_t*>(words);
      const int64_t c = 8 * start, columns = std::min(width, c + 8 * n) - c;
      for (int t = 0; t < num_tasks; ++t)
        round_row(tasks[t].bits, tasks[t].from + c, columns, lanes + t * 8 * n, tasks[t].levels,
                  tasks[t].out + c * tasks[t].bits / 8);
    }
  }
};

// ---- decoding

template <int Bits, class T>
inline void raise_piece(const uint8_t* in, float zero, float step, T* to) {
  alignas(64) uint8_t codes[kPiece];
  unpack<Bits>(in, codes);
#pragma GCC unroll 4
  for (int c = 0; c < kPiece; c += kWide) {
    ShortVec<uint8_t, kWide> code;
    std::memcpy(&code, codes + c, sizeof code);
    using Signed = ShortVec<int32_t, kWide>;
    const Floats level = __builtin_convertvector(__builtin_convertvector(code, Signed), Floats);
    put_floats(to + c, level * step + zero);
  }
}

template <int Bits, class T>
void raise_row(const uint8_t* in, float zero, float step, int64_t width, T* to) {
  int64_t c = 0;
  for (; c + kPiece <= width; c += kPiece) raise_piece<Bits>(in + c * Bits / 8, zero, step, to + c);
  if (c == width) return;
  uint8_t packed[kPiece] = {};
  T rest[kPiece];
  std::memcpy(packed, in + c * Bits / 8, size_t(row_bytes(width - c, Bits)));
  raise_piece<Bits>(packed, zero, step, rest);
  std::memcpy(to + c, rest, size_t(width - c) * sizeof(T));
}

// False if a value is not finite, which encoding never writes.
template <class V, class T>
bool take(const uint8_t* in, int64_t width, T* to) {
  V values[kPiece] = {};
  float probes[kPiece] = {};
  for (int64_t c = 0; c < width; c += kPiece) {
    const int64_t n = std::min(kPiece, width - c);
    std::memcpy(values, in + c * int64_t(sizeof(V)), size_t(n) * sizeof(V));
    for (int64_t i = 0; i < kPiece; ++i) probes[i] += to_sum(values[i]) * 0.0f;
    for (int64_t i = 0; i < n; ++i) put(to + c + i, to_sum(values[i]));
  }
  float probe = 0;
  for (const float p : probes) probe += p;
  return probe == 0.0f;
}

// False if the parameters are none that encoding writes.
template <class T>
bool decode_row(const uint8_t* in, int bits, uint16_t zero_bits, uint16_t step_bits, int64_t width, T* to) {
  if (step_bits & 0x8000) {
    const uint32_t lowest = width ? in[0] & 1u : 0u;
    const float value = float_of(uint32_t(zero_bits) << 16 | (step_bits & 0x7FFFu) << 1 | lowest);
    for (int64_t c = 0; c < width; ++c) put(to + c, value);
    return std::fabs(value) < kLimit;
  }
  const float zero = float_of(uint32_t(zero_bits) << 16), step = float_of(uint32_t(step_bits) << 16);
  const float top = step * float((1 << bits) - 1) + zero;
  if (!(std::fabs(zero) <= kLimit && step >= kSmallest && top < 2 * kLimit)) return false;
  switch (bits) {
    case 1: raise_row<1>(in, zero, step, width, to); break;
    case 2: raise_row<2>(in, zero, step, width, to); break;
    case 4: raise_row<4>(in, zero, step, width, to); break;
    default: raise_row<8>(in, zero, step, width, to); break;
  }
  return true;
}

template <class T>
int64_t decode(const uint8_t* data, const uint8_t* bits, int64_t k, int64_t width, T* out, int threads) {
  const int64_t grain = rows_per_range(width);
  const std::vector<Place> starts = places(bits, k, width, grain);
  const uint8_t *const zeros = data + starts.back().codes, *const steps = zeros + 2 * starts.back().params;
  First bad;
  parallel_for(k, grain, threads, [&](int64_t begin, int64_t end) {
    Place at = starts[size_t(begin / grain)];
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* const in = data + at.codes;
      T* const to = out + r * width;
      const int b = bits[r];
      at.codes += row_bytes(width, b);
      bool is_good;
      if (b == 32) {
        is_good = take<float>(in, width, to);
      } else if (b == 16) {
        is_good = take<bf16>(in, width, to);
      } else {
        uint16_t zero, step;
        std::memcpy(&zero, zeros + 2 * at.params, 2);
        std::memcpy(&step, steps + 2 * at.params, 2);
        ++at.params;
        is_good = decode_row(in, b, zero, step, width, to);
      }
      if (!is_good) bad.note(r);
    }
  });
  return bad.get();
}

template <class T>
int64_t encode(const T* h, int64_t num_rows, int64_t width, const int64_t* rows, const int64_t* ids,
               const uint8_t* bits, int64_t k, uint64_t key, uint8_t* out, float* spans, int threads) {
  const int64_t grain = rows_per_range(width);
  const std::vector<Place> starts = places(bits, k, width, grain);
  uint8_t *const zeros = out + starts.back().codes, *const steps = zeros + 2 * starts.back().params;
  First bad;
  const Encoder<T> encoder = {h, num_rows, width, rows, ids, bits, k, key, out, zeros, steps, spans, &bad};
  parallel_for(k, grain, threads,
               [&](int64_t begin, int64_t end) { encoder.run(begin, end, starts[size_t(begin / grain)]); });
  return bad.get();
}

}  // namespace

// Bytes of a message; or -1, with the place of the first width that there is not in where[0].
int64_t quantised_bytes PH_SIZE_ARGS {
  int64_t count[256] = {};
  for (int64_t r = 0; r < k; ++r) ++count[bits[r]];
  int64_t known = 0, total = 0;
  for (const int b : {1, 2, 4, 8, 16, 32}) {
    known += count[b];
    total += count[b] * (row_bytes(width, b) + (b <= 8 ? 4 : 0));
  }
  if (known == k) return total;
  const auto is_known = [](int b) { return b > 0 && b <= 32 && !(b & (b - 1)); };
  where[0] = 0;
  while (is_known(bits[where[0]])) ++where[0];
  return -1;
}

// The place of the first row that cannot be encoded (its number is outside h, or a value is not finite or too large), or -1.
int64_t quantise_rows PH_ENCODE_ARGS {
  int64_t bad = -1;
  PH_ROW_TYPES(type, bad = encode(static_cast<const T*>(h), num_rows, width, rows, ids, bits, k, uint64_t(key), out,
                                  spans, int(threads)))
  return bad;
}

// The place of the first row that no encoder wrote, or -1. `data` has the length of quantised_bytes.
int64_t dequantise_rows PH_DECODE_ARGS {
  int64_t bad = -1;
  PH_ROW_TYPES(type, bad = decode(data, bits, k, width, static_cast<T*>(out), int(threads)))
  return bad;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_quantised_bytes PH_SIZE_ARGS { return PH_PICK(quantised_bytes)(bits, k, width, where); }
PH_EXPORT int64_t ph_quantise_rows PH_ENCODE_ARGS {
  return PH_PICK(quantise_rows)(h, type, num_rows, width, rows, ids, bits, k, key, out, spans, threads);
}
PH_EXPORT int64_t ph_dequantise_rows PH_DECODE_ARGS {
  return PH_PICK(dequantise_rows)(data, bits, k, width, out, type, threads);
}
#endif
