// Weighted sums of neighbour rows: out[i] = dst_scale[i] * sum_e w[e] src_scale[j] h[row(j)] + self_scale[i] h[row(own)].
//
// Each destination's sum stays in registers over a tile of columns while the neighbours' rows stream past, prefetched a
// few edges ahead, across row boundaries. Memory bound: see benchmarks.
#include "isa.h"
#include "ranges.h"
#include "simd.h"

#define PH_ARGS                                                                                                        \
  (const int64_t* indptr, const void* indices, int64_t wide, const int64_t* rows, const void* h, int64_t type,          \
   int64_t width, int64_t num_dst, void* out, const void* edge_weight, const void* edge, const void* src_scale,         \
   const void* dst_scale, const void* self_scale, int64_t self_begin, int64_t self_end, int64_t self_shift,             \
   int64_t threads)

PH_DECLARE(int64_t, spmm, PH_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTile = 16;  // vectors of accumulators: half of the 32 registers
#else
constexpr int kTile = 8;
#endif

template <class T, class I>
struct Task {
  using A = Sum<T>;
  const int64_t* indptr;
  const I* indices;
  const int64_t* rows;
  const T* h;
  int64_t width, num_edges;
  T* out;
  const A* edge_weight;
  const I* edge;  // position of each edge's weight; null = its own
  const A *src_scale, *dst_scale, *self_scale;
  int64_t self_begin, self_end, self_shift;

  const T* row(int64_t s) const { return h + (rows ? rows[s] : s) * width; }

  A factor(int64_t e, int64_t j) const {
    A f = edge_weight ? edge_weight[edge ? int64_t(edge[e]) : e] : A(1);
    return src_scale ? f * src_scale[j] : f;
  }
};

// One destination, columns [column, column + V vectors + tail). Every loop over V is unrolled: the sums stay in registers.
// Plain = no pool, no factors: nothing to look up between rows.
template <class T, class I, bool Plain, int V>
void tile(const Task<T, I>& t, int64_t i, int64_t column, int tail) {
  using A = Sum<T>;
  constexpr int L = kLanes<T>, kLines = V * L * int(sizeof(T)) / 64;
  const Vec<A> zero = {};
  Vec<A> sum[V + 1], last = zero;
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) sum[v] = zero;
  const T* h = t.h + column;
  const int64_t end = t.indptr[i + 1], num_edges = t.num_edges, width = t.width;
  const bool has_more = tail != 0 || V * L * int(sizeof(T)) % 64 != 0;
  constexpr int64_t ahead = rows_ahead(kLines + 1);
  for (int64_t e = t.indptr[i]; e < end; ++e) {
    if (e + ahead < num_edges) {
      const T* soon = Plain ? h + int64_t(t.indices[e + ahead]) * width : t.row(t.indices[e + ahead]) + column;
      prefetch(soon, kLines);
      if (has_more) prefetch(soon + kLines * 64 / int(sizeof(T)), 1);
    }
    const int64_t j = t.indices[e];
    const T* from = Plain ? h + j * width : t.row(j) + column;
    const Vec<A> factor = (Plain ? A(1) : t.factor(e, j)) - zero;
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[v] += Plain ? load(from + v * L) : factor * load(from + v * L);
    if (tail) last += factor * load_part(from + V * L, tail);
  }
  if (t.dst_scale) {
    const Vec<A> scale = t.dst_scale[i] - zero;
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[v] *= scale;
    last *= scale;
  }
  if (t.self_scale && i >= t.self_begin && i < t.self_end) {
    const T* from = t.row(i + t.self_shift) + column;
    const Vec<A> factor = t.self_scale[i - t.self_begin] - zero;
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[v] += factor * load(from + v * L);
    if (tail) last += factor * load_part(from + V * L, tail);
  }
  T* to = t.out + i * width + column;
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) store(to + v * L, sum[v]);
  if (tail) store_part(to + V * L, last, tail);
}

template <class T, class I>
using TileOf = void (*)(const Task<T, I>&, int64_t, int64_t, int);

template <class T, class I, int... V>
TileOf<T, I> pick_tile(bool is_plain, int vectors, std::integer_sequence<int, V...>) {
  static constexpr TileOf<T, I> plain[] = {&tile<T, I, true, V>...}, any[] = {&tile<T, I, false, V>...};
  return is_plain ? plain[vectors] : any[vectors];
}

template <class T, class I>
void run(const Task<T, I>& t, int64_t num_dst, int threads) {
  if (t.width == 0) return;
  constexpr int L = kLanes<T>;
  const auto widths = std::make_integer_sequence<int, kTile + 1>();
  const int64_t whole = t.width / (kTile * L) * (kTile * L), rest = t.width - whole;
  const bool is_plain = !t.rows && !t.edge_weight && !t.src_scale;
  const TileOf<T, I> full = pick_tile<T, I>(is_plain, kTile, widths);
  const TileOf<T, I> last = pick_tile<T, I>(is_plain, int(rest / L), widths);
  const int64_t grain = std::max<int64_t>(64, (int64_t(1) << 20) / t.width);
  for_rows(t.indptr, num_dst, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t c = 0; c < whole; c += kTile * L) full(t, i, c, 0);
      if (rest > 0) last(t, i, whole, int(rest % L));
    }
  });
}

}  // namespace

int64_t spmm PH_ARGS {
#define PH_RUN(I)                                                                                                  \
  PH_ROW_TYPES(type, using A = Sum<T>; run(                                                                         \
                   Task<T, I>{indptr, static_cast<const I*>(indices), rows, static_cast<const T*>(h), width,         \
                              indptr[num_dst], static_cast<T*>(out), static_cast<const A*>(edge_weight),             \
                              static_cast<const I*>(edge), static_cast<const A*>(src_scale),                         \
                              static_cast<const A*>(dst_scale), static_cast<const A*>(self_scale), self_begin,       \
                              self_end, self_shift},                                                                 \
                   num_dst, int(threads)))
  if (wide) {
    PH_RUN(int64_t);
  } else {
    PH_RUN(int32_t);
  }
  return 0;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_spmm PH_ARGS {
  return PH_PICK(spmm)(indptr, indices, wide, rows, h, type, width, num_dst, out, edge_weight, edge, src_scale,
                       dst_scale, self_scale, self_begin, self_end, self_shift, threads);
}
#endif
