// Pieces of the attention kernels: what both directions know, the keyed mask, weighted sums of rows, vectors of heads.
#pragma once
#include <algorithm>
#include <type_traits>

#include "philox_many.h"
#include "simd.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors pass between functions of one file only

namespace polyhop {
namespace PH_ISA {
namespace {

template <class T>
struct Common {
  using A = Sum<T>;
  int64_t num_dst, num_src, dst_start;
  const T* x;
  int64_t heads, channels;
  const A *a_src, *a_dst;
  A slope;
  bool self_loop;
  const int64_t* src_ids;
  const uint64_t* keys;  // one per 8 heads; null = no dropout
  int64_t limit;

  int64_t width() const { return heads * channels; }
  uint64_t id(int64_t s) const { return uint64_t(src_ids ? src_ids[s] : s); }
};

template <class V, class A>
inline V leaky(V z, A slope) {
  return z > A(0) ? z : slope * z;
}

// Multiplies weight[k * heads + h] by 0 or the kept scale, for n edges with the given endpoints.
template <class T>
void mask(const Common<T>& t, const uint64_t* dst, const uint64_t* src, int64_t n, Sum<T>* weight) {
  using A = Sum<T>;
  constexpr int64_t kBatch = 64;
  const A scale = A(65536.0 / double(65536 - t.limit));
  uint32_t words[4 * kBatch];
  for (int64_t first = 0; first < t.heads; first += 8) {
    const int here = int(std::min<int64_t>(8, t.heads - first));
    for (int64_t b = 0; b < n; b += kBatch) {
      const int64_t count = std::min(kBatch, n - b);
      philox_many(t.keys[first / 8], dst + b, src + b, int(count), words);
      for (int64_t k = 0; k < count; ++k)
        for (int l = 0; l < here; ++l)
          weight[(b + k) * t.heads + first + l] *= lane16(words + 4 * k, l) >= uint32_t(t.limit) ? scale : A(0);
    }
  }
}

// The edges of one destination, loops left out, and the edge list around them for asking ahead.
template <class I>
struct Edges {
  const int64_t* source;
  int64_t n;
  const I* indices;  // at the first edge
  int64_t left;      // edges of the whole block from there on

  template <class T>
  void ask(int64_t k, const T* x, int64_t width, int lines) const {
    const int64_t soon = k + rows_ahead(lines);
    if (soon < left) prefetch(x + int64_t(indices[soon]) * width, lines);
  }
};

// `H` heads of `V` vectors of `L` values each, sums in registers: to = (Add ? to : 0) + sum_k weight[k] * x[source[k]].
template <bool Add, class T, class I, class O, int H, int V, int L>
void sum_tile(const T* x, int64_t width, const Edges<I>& edges, const Sum<T>* weight, int64_t heads, O* to) {
  using A = Sum<T>;
  constexpr int kLines = H * V * L * int(sizeof(T)) / 64;
  const ShortVec<A, L> zero = {};
  ShortVec<A, L> sum[H * V];
#pragma GCC unroll 16
  for (int v = 0; v < H * V; ++v) {
    if constexpr (Add)
      sum[v] = load_n<L>(to + v * L);
    else
      sum[v] = zero;
  }
  for (int64_t k = 0; k < edges.n; ++k) {
    edges.ask(k, x, width, std::max(kLines, 1));
    const T* from = x + edges.source[k] * width;
    const A* w = weight + k * heads;
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[h * V + v] += w[h] * load_n<L>(from + (h * V + v) * L);
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < H * V; ++v) store_n<L>(to + v * L, sum[v]);
}

#if defined(__AVX512F__)
constexpr int kTile = 16;
#else
constexpr int kTile = 8;
#endif

template <bool Add, int V, int L, class T, class I, class O>
void sum_heads(const T* x, int64_t width, const Edges<I>& edges, const Sum<T>* weight, int64_t heads, O* to) {
  constexpr int64_t C = V * L;
  int64_t h = 0;
  const auto step = [&](auto count) {
    constexpr int H = decltype(count)::value;
    if constexpr (H * V <= kTile)
      for (; h + H <= heads; h += H)
        sum_tile<Add, T, I, O, H, V, L>(x + h * C, width, edges, weight + h, heads, to + h * C);
  };
  step(std::integral_constant<int, 16>());
  step(std::integral_constant<int, 8>());
  step(std::integral_constant<int, 4>());
  step(std::integral_constant<int, 2>());
  step(std::integral_constant<int, 1>());
}

// to = (Add ? to : 0) + sum_k weight[k] * x[source[k]], each head with its own weight, k ascending. False: no tile fits.
template <bool Add, class T, class I, class O>
bool sum_by_tiles(const T* x, int64_t heads, int64_t channels, const Edges<I>& edges, const Sum<T>* weight, O* to) {
  constexpr int L = kLanes<T>;
  const int64_t width = heads * channels;
  if (channels == L / 2)
    sum_heads<Add, 1, L / 2>(x, width, edges, weight, heads, to);
  else if (channels == L)
    sum_heads<Add, 1, L>(x, width, edges, weight, heads, to);
  else if (channels == 2 * L)
    sum_heads<Add, 2, L>(x, width, edges, weight, heads, to);
  else if (channels == 4 * L)
    sum_heads<Add, 4, L>(x, width, edges, weight, heads, to);
  else if (channels == 8 * L)
    sum_heads<Add, 8, L>(x, width, edges, weight, heads, to);
  else if (kTile >= 16 && channels == 16 * L)
    sum_heads<Add, kTile, L>(x, width, edges, weight, heads, to);
  else
    return false;
  return true;
}

// The same for any number of channels, to += with the sums in the first level cache.
template <class T, class I>
void sum_by_rows(const T* x, int64_t heads, int64_t channels, const Edges<I>& edges, const Sum<T>* weight, Sum<T>* to) {
  const int64_t width = heads * channels;
  const int lines = lines_of(width * int64_t(sizeof(T)));
  for (int64_t k = 0; k < edges.n; ++k) {
    edges.ask(k, x, width, lines);
    const T* from = x + edges.source[k] * width;
    for (int64_t h = 0; h < heads; ++h) add_scaled(to + h * channels, weight[k * heads + h], from + h * channels, channels);
  }
}

// Calls f with the number of heads as a constant where it is a usual one, else with 1 and the caller loops over heads.
template <class F>
void with_heads(int64_t heads, const F& f) {
  switch (heads) {
    case 2: return f(std::integral_constant<int, 2>());
    case 4: return f(std::integral_constant<int, 4>());
    case 8: return f(std::integral_constant<int, 8>());
    default: return f(std::integral_constant<int, 1>());
  }
}

// One value per head: a vector of H lanes, so that a usual number of heads costs little more than one.
template <class A, int H>
using Heads = std::conditional_t<H == 1, A, ShortVec<A, H>>;
template <int H, class A>
inline Heads<A, H> heads_at(const A* at) {
  Heads<A, H> v;
  std::memcpy(&v, at, sizeof v);
  return v;
}
template <class A, class V>
inline void put_heads(A* at, V v) {
  std::memcpy(at, &v, sizeof v);
}
template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

}  // namespace
}  // namespace PH_ISA
}  // namespace polyhop
