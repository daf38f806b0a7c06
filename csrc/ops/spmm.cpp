// Weighted sums of neighbour rows: out[i] = dst_scale[i] * sum_e w[e] src_scale[j] h[row(j)] + self_scale[i] h[row(own)].
//
// Each destination's sum stays in registers over a tile of columns while the neighbours' rows stream past, prefetched a
// few edges ahead, across row boundaries. Memory bound: see benchmarks.
//
// h may lie in two matrices: row r is in the first if r < num_first, else it is row r - num_first of the second.
#include "isa.h"
#include "ranges.h"
#include "simd.h"
#include "two_places.h"

#define PH_ARGS                                                                                                        \
  (const int64_t* indptr, const void* indices, int64_t wide, const int64_t* rows, const void* h, int64_t type,          \
   int64_t width, int64_t num_dst, void* out, const void* edge_weight, const void* edge, const void* src_scale,         \
   const void* dst_scale, const void* self_scale, int64_t self_begin, int64_t self_end, int64_t self_shift,             \
   int64_t threads)
#define PH_POOLED_ARGS                                                                                                 \
  (const int64_t* indptr, const void* indices, int64_t wide, const int64_t* rows, const void* h, int64_t num_first,     \
   const void* second, int64_t type, int64_t width, int64_t num_dst, void* out, const void* edge_weight,                \
   const void* edge, const void* src_scale, const void* dst_scale, const void* self_scale, int64_t self_begin,          \
   int64_t self_end, int64_t self_shift, int64_t threads)

PH_DECLARE(int64_t, spmm, PH_POOLED_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTile = 16;  // vectors of accumulators: half of the 32 registers
#else
constexpr int kTile = 8;
#endif

// What stands between an edge and its source's row.
enum class Reads {
  kPlain,  // nothing: no pool, no factors
  kAny,    // a pool, factors
  kTwo,    // the same, with rows in two matrices
};

template <class T, class I>
struct Task {
  using A = Sum<T>;
  const int64_t* indptr;
  const I* indices;
  const int64_t* rows;
  const T* h;
  TwoPlaces<T> two;  // read with Reads::kTwo
  int64_t width, num_edges;
  T* out;
  const A* edge_weight;
  const I* edge;  // position of each edge's weight; null = its own
  const A *src_scale, *dst_scale, *self_scale;
  int64_t self_begin, self_end, self_shift;

  template <Reads R>
  const T* row(int64_t s) const {
    const int64_t r = rows ? rows[s] : s;
    return R == Reads::kTwo ? two.row(r) : h + r * width;
  }

  A factor(int64_t e, int64_t j) const {
    A f = edge_weight ? edge_weight[edge ? int64_t(edge[e]) : e] : A(1);
    return src_scale ? f * src_scale[j] : f;
  }
};

// One destination, columns [column, column + V vectors + tail). Every loop over V is unrolled: the sums stay in registers.
template <class T, class I, Reads R, int V>
void tile(const Task<T, I>& t, int64_t i, int64_t column, int tail) {
  using A = Sum<T>;
  constexpr bool Plain = R == Reads::kPlain;
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
      const int64_t next = t.indices[e + ahead];
      const T* soon = Plain ? h + next * width : t.template row<R>(next) + column;
      prefetch(soon, kLines);
      if (has_more) prefetch(soon + kLines * 64 / int(sizeof(T)), 1);
    }
    const int64_t j = t.indices[e];
    const T* from = Plain ? h + j * width : t.template row<R>(j) + column;
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
    const T* from = t.template row<R>(i + t.self_shift) + column;
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
TileOf<T, I> pick_tile(Reads reads, int vectors, std::integer_sequence<int, V...>) {
  static constexpr TileOf<T, I> plain[] = {&tile<T, I, Reads::kPlain, V>...}, any[] = {&tile<T, I, Reads::kAny, V>...},
                                two[] = {&tile<T, I, Reads::kTwo, V>...};
  return reads == Reads::kPlain ? plain[vectors] : reads == Reads::kAny ? any[vectors] : two[vectors];
}

template <class T, class I>
void run(const Task<T, I>& t, bool is_two, int64_t num_dst, int threads) {
  if (t.width == 0) return;
  constexpr int L = kLanes<T>;
  const auto widths = std::make_integer_sequence<int, kTile + 1>();
  const int64_t whole = t.width / (kTile * L) * (kTile * L), rest = t.width - whole;
  const bool is_plain = !t.rows && !t.edge_weight && !t.src_scale;
  const Reads reads = is_two ? Reads::kTwo : is_plain ? Reads::kPlain : Reads::kAny;
  const TileOf<T, I> full = pick_tile<T, I>(reads, kTile, widths);
  const TileOf<T, I> last = pick_tile<T, I>(reads, int(rest / L), widths);
  const int64_t grain = std::max<int64_t>(64, (int64_t(1) << 20) / t.width);
  for_rows(t.indptr, num_dst, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t c = 0; c < whole; c += kTile * L) full(t, i, c, 0);
      if (rest > 0) last(t, i, whole, int(rest % L));
    }
  });
}

}  // namespace

int64_t spmm PH_POOLED_ARGS {
#define PH_RUN(I)                                                                                                  \
  PH_ROW_TYPES(type, using A = Sum<T>; run(                                                                         \
                   Task<T, I>{indptr, static_cast<const I*>(indices), rows, static_cast<const T*>(h),                \
                              {static_cast<const T*>(h), num_first, static_cast<const T*>(second), width}, width,    \
                              indptr[num_dst], static_cast<T*>(out), static_cast<const A*>(edge_weight),             \
                              static_cast<const I*>(edge), static_cast<const A*>(src_scale),                         \
                              static_cast<const A*>(dst_scale), static_cast<const A*>(self_scale), self_begin,       \
                              self_end, self_shift},                                                                 \
                   second != nullptr, num_dst, int(threads)))
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
  return PH_PICK(spmm)(indptr, indices, wide, rows, h, 0, nullptr, type, width, num_dst, out, edge_weight, edge,
                       src_scale, dst_scale, self_scale, self_begin, self_end, self_shift, threads);
}
PH_EXPORT int64_t ph_spmm_pooled PH_POOLED_ARGS {
  return PH_PICK(spmm)(indptr, indices, wide, rows, h, num_first, second, type, width, num_dst, out, edge_weight, edge,
                       src_scale, dst_scale, self_scale, self_begin, self_end, self_shift, threads);
}
#endif
