// Which in-edges of a node are drawn: a pure function of (key, node, degree, fan-out); for LABOR-0, of (key, sources).
//
// Uniform without replacement is Floyd's algorithm: for j = d-f .. d-1 take t in 0..j (inclusive), or j itself if t was
// taken. Draw i uses word i of the node's Philox stream (multiply-shift, 32 bits) or, for degrees above 65536, words
// 2i and 2i+1 (64 bits). Positions come out ascending. Two ways to the same picks: one node per vector lane for small
// fan-outs, a bit map for the rest.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "philox.h"
#include "variates.h"

namespace polyhop {
namespace PH_ISA {
namespace {  // nothing here is shared with other files or other instruction sets

constexpr int kLaneFanout = 64;     // largest fan-out drawn in lanes: its cost per node grows with the square
constexpr int64_t kNarrow = 65536;  // largest degree served by 32-bit draws (bias below 2^-16)

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef uint32_t Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t SignedLanes __attribute__((vector_size(4 * kLanes)));
typedef uint64_t WideLanes __attribute__((vector_size(4 * kLanes)));  // half as many

// Products of the even lanes (the low half of each 64-bit pair).
inline __attribute__((always_inline)) WideLanes multiply_even(const WideLanes& a, const WideLanes& b) {
#if defined(__AVX512F__)
  return WideLanes(_mm512_maskz_mul_epu32(0xFF, __m512i(a), __m512i(b)));
#elif defined(__AVX2__)
  return WideLanes(_mm256_mul_epu32(__m256i(a), __m256i(b)));
#elif defined(__SSE2__)
  return WideLanes(_mm_mul_epu32(__m128i(a), __m128i(b)));
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// High halves of a * b, lane by lane.
inline __attribute__((always_inline)) Lanes multiply_high(const Lanes& a, const Lanes& b) {
  const WideLanes even = multiply_even(WideLanes(a), WideLanes(b));
  const WideLanes odd = multiply_even(WideLanes(a) >> 32, WideLanes(b) >> 32);
  return Lanes((even >> 32) | (odd & ~uint64_t(0xFFFFFFFFu)));
}

// Whether any lane of a comparison holds.
inline __attribute__((always_inline)) bool any(const SignedLanes& holds) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(__m512i(holds), __m512i(holds)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8(__m256i(holds)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_epi8(__m128i(holds)) != 0;
#else
  return (holds[0] | holds[1] | holds[2] | holds[3]) != 0;
#endif
}

// philox(key, id[l], other) for one id per lane. Even and odd lanes go apart, each in the low half of 64 bits; what is in
// the high halves is never read.
inline void philox_lanes(uint64_t key, const Lanes& id_low, const Lanes& id_high, uint32_t other, Lanes out[4]) {
  const WideLanes m0 = WideLanes{} + kPhiloxM0, m1 = WideLanes{} + kPhiloxM1, zero{};
  WideLanes even[4] = {WideLanes(id_low), WideLanes(id_high), zero + other, zero};
  WideLanes odd[4] = {WideLanes(id_low) >> 32, WideLanes(id_high) >> 32, zero + other, zero};
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (WideLanes* c : {even, odd}) {
      const WideLanes p0 = multiply_even(c[0], m0), p1 = multiply_even(c[2], m1);
      c[0] = (p1 >> 32) ^ c[1] ^ uint64_t(k0);
      c[2] = (p0 >> 32) ^ c[3] ^ uint64_t(k1);
      c[1] = p1;
      c[3] = p0;
    }
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  for (int i = 0; i < 4; ++i) out[i] = Lanes((even[i] & 0xFFFFFFFFu) | (odd[i] << 32));
}

// Floyd for one node per lane: picks[k][l] is the k-th smallest pick of lane l. Needs fanout < degree <= kNarrow.
inline void floyd_lanes(uint64_t key, const Lanes& id_low, const Lanes& id_high, const Lanes& degree, int fanout,
                        SignedLanes* picks) {
  Lanes words[4];
  Lanes last = degree - uint32_t(fanout);  // j: the largest position this draw may take
  for (int i = 0; i < fanout; ++i, last += 1) {
    if (i % 4 == 0) philox_lanes(key, id_low, id_high, uint32_t(i / 4), words);
    SignedLanes t = SignedLanes(multiply_high(words[i % 4], last + 1)), taken{};
    for (int k = 0; k < i; ++k) taken |= picks[k] == t;
    t = taken ? SignedLanes(last) : t;
    for (int k = 0; k < i; ++k) {  // insert into the ascending picks
      const SignedLanes pick = picks[k];
      picks[k] = pick < t ? pick : t;
      t = pick < t ? t : pick;
    }
    picks[i] = t;
  }
}

// Floyd for one node of any degree and fan-out < degree; `taken` is all zero before and after.
class FloydBits {
 public:
  template <class Out>
  void draw(uint64_t key, uint64_t id, int64_t degree, int64_t fanout, Out* picks) {
    if (int64_t(taken_.size()) * 64 < degree) taken_.resize(size_t(degree + 63) / 64, 0);
    Words4 words{};
    for (int64_t i = 0; i < fanout; ++i) {
      const int64_t j = degree - fanout + i;
      int64_t t;
      if (degree <= kNarrow) {
        if (i % 4 == 0) words = philox(key, id, uint64_t(i / 4));
        t = int64_t(uint64_t(words.w[i % 4]) * uint64_t(j + 1) >> 32);
      } else {
        if (i % 2 == 0) words = philox(key, id, uint64_t(i / 2));
        const uint64_t word = uint64_t(words.w[i % 2 * 2 + 1]) << 32 | words.w[i % 2 * 2];
        t = int64_t(static_cast<unsigned __int128>(word) * uint64_t(j + 1) >> 64);
      }
      if (taken_[size_t(t / 64)] >> (t % 64) & 1) t = j;
      taken_[size_t(t / 64)] |= uint64_t(1) << (t % 64);
      picks[i] = Out(t);
    }
    for (int64_t i = 0; i < fanout; ++i) taken_[size_t(picks[i]) / 64] = 0;
    std::sort(picks, picks + fanout);
  }

 private:
  std::vector<uint64_t> taken_;
};

// Ids on their way into lanes: a vector that is set lane by lane goes through memory for each of them.
struct IdLanes {
  uint32_t lows[kLanes] = {}, highs[kLanes] = {};

  void set(int l, uint64_t id) { lows[l] = uint32_t(id), highs[l] = uint32_t(id >> 32); }
  void load(Lanes& low, Lanes& high) const {
    std::memcpy(&low, lows, sizeof(low));
    std::memcpy(&high, highs, sizeof(high));
  }
};

// How LABOR reads a list: the entry itself is the id that numbers a source.
template <class Index>
struct OwnIds {
  const Index* indices;

  // The first lines of a list; the rest is a stream the processor sees.
  void ask(int64_t begin, int64_t degree) const {
    constexpr int64_t kLine = 64 / sizeof(Index);
    for (int64_t k = 0; k < std::min(degree, 4 * kLine); k += kLine) __builtin_prefetch(&indices[begin + k], 0, 3);
  }

  __attribute__((always_inline)) void load(int64_t at, int count, Lanes& low, Lanes& high) const {
    const Index* ids = indices + at;
    if (sizeof(Index) == 4 && count == kLanes) {
      std::memcpy(&low, ids, sizeof(low));
      return;
    }
    IdLanes lanes;
    for (int l = 0; l < count; ++l) lanes.set(l, uint64_t(ids[l]));
    lanes.load(low, high);
  }
};

// Or the entry is a row of a table of ids, which is read out of order: entries are looked up some groups ahead.
template <class Index>
struct TableIds {
  const Index* indices;
  int64_t num_edges;
  const int64_t* table;

  void ask(int64_t begin, int64_t degree) const { OwnIds<Index>{indices}.ask(begin, degree); }

  __attribute__((always_inline)) void load(int64_t at, int count, Lanes& low, Lanes& high) const {
    constexpr int64_t kAhead = 32;
    const int64_t soon = std::min(at + kAhead, num_edges), end = std::min(soon + count, num_edges);
    for (int64_t k = soon; k < end; ++k) __builtin_prefetch(&table[indices[k]], 0, 3);
    IdLanes lanes;
    for (int l = 0; l < count; ++l) lanes.set(l, uint64_t(table[indices[at + l]]));
    lanes.load(low, high);
  }
};

// LABOR-0: every source has one number per hop, shared by all destinations; a node keeps its `fanout` smallest.
class Labor {
 public:
  template <class Sources, class Out>
  void draw(const Variates& v, Sources sources, int64_t list, int64_t degree, int64_t fanout, Out* picks) {
    // Few numbers are below a little more than fanout / degree; in the rare case that too few are, all are looked at.
    const double likely = (double(fanout) + 4 * std::sqrt(double(fanout)) + 4) / double(degree);
    if (int64_t(best_.size()) < degree) best_.resize(size_t(degree));
    int64_t found = 0;
    if (likely < 1) found = scan(v, sources, list, degree, uint32_t(likely * 4294967296.0));
    if (found < fanout) found = scan(v, sources, list, degree, ~0u);
    std::nth_element(best_.begin(), best_.begin() + fanout - 1, best_.begin() + found);
    for (int64_t i = 0; i < fanout; ++i) picks[i] = Out(best_[size_t(i)] & 0xFFFFFFFFu);
    std::sort(picks, picks + fanout);
  }

 private:
  // Finds all sources of the list whose number is at most `bound`; how many.
  template <class Sources>
  int64_t scan(const Variates& v, Sources sources, int64_t list, int64_t degree, uint32_t bound) {
    return v.far == 0 ? scan_words(v.first, sources, list, degree, bound) : scan_turned(v, sources, list, degree, bound);
  }

  template <class Sources>
  int64_t scan_words(uint64_t key, Sources sources, int64_t list, int64_t degree, uint32_t bound) {
    uint64_t* best = best_.data();
    int64_t found = 0;
    for (int64_t begin = 0; begin < degree; begin += kLanes) {
      const int count = int(std::min<int64_t>(kLanes, degree - begin));
      Lanes low{}, high{}, words[4];
      sources.load(list + begin, count, low, high);
      philox_lanes(key, low, high, 0, words);
      if (!any(words[0] <= bound)) continue;
      uint32_t number[kLanes];
      std::memcpy(number, &words[0], sizeof(number));
      for (int l = 0; l < count; ++l) {
        best[found] = uint64_t(number[l]) << 32 | uint64_t(begin + l);  // kept only if small enough
        found += number[l] <= bound;
      }
    }
    return found;
  }

  // The same where numbers turn from one key to another: those that may be small enough are computed, many at once.
  template <class Sources>
  int64_t scan_turned(const Variates& v, Sources sources, int64_t list, int64_t degree, uint32_t bound) {
    if (!least_ || v.near != near_) {
      least_ = std::make_unique<LeastNumbers>(v);
      near_ = v.near;
    }
    const float most = bound == ~0u ? INFINITY : LeastNumbers::most(bound);
    int64_t found = 0, waiting = 0;
    for (int64_t begin = 0; begin < degree; begin += kLanes) {
      const int count = int(std::min<int64_t>(kLanes, degree - begin));
      Lanes low{}, high{}, words[4];
      uint32_t a[kLanes], b[kLanes];
      sources.load(list + begin, count, low, high);
      philox_lanes(v.first, low, high, 0, words);
      std::memcpy(a, &words[0], sizeof(a));
      philox_lanes(v.second, low, high, 0, words);
      std::memcpy(b, &words[0], sizeof(b));
      for (int l = 0; l < count; ++l) {
        a_[waiting] = a[l];
        b_[waiting] = b[l];
        at_[waiting] = uint32_t(begin + l);
        waiting += least_->least(a[l], b[l]) <= most;  // kept only if so
      }
      if (waiting <= kWaiting - kLanes && begin + kLanes < degree) continue;
      found = compute(v, waiting, bound, found);
      waiting = 0;
    }
    return found;
  }

  int64_t compute(const Variates& v, int64_t waiting, uint32_t bound, int64_t found) {
    uint32_t number[kWaiting];
    turned_numbers(v, a_, b_, waiting, number);
    for (int64_t i = 0; i < waiting; ++i) {
      best_[size_t(found)] = uint64_t(number[i]) << 32 | at_[i];
      found += number[i] <= bound;
    }
    return found;
  }

  static constexpr int64_t kWaiting = 64, kRoom = kWaiting + 16;
  static_assert(kLanes <= kRoom - kWaiting, "a group of sources fits behind those that wait");
  std::vector<uint64_t> best_;  // (source's number << 32 | position): the earlier position wins a tie
  std::unique_ptr<LeastNumbers> least_;
  double near_ = 0;  // of what `least_` was made for
  // As large for every instruction set: a sampler is made by one and used by another.
  uint32_t a_[kRoom], b_[kRoom], at_[kRoom];
};

}  // namespace
}  // namespace PH_ISA
}  // namespace polyhop
