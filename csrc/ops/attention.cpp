// Fused attention: edge softmax and weighted sum per destination; the weights are computed again in the backward pass.
//
// For edge j -> i and head h: z = a_src[j] + a_dst[i], weight = exp(leaky(z) - top[i]) * inverse[i], dropped by a keyed
// mask. Backward runs over the edges grouped by source: one gather of the output gradient's rows gives the products
// <grad_i, x_j>, the gradient of x_j and of a_src[j]; each edge's score gradient goes to a scratch row that a second,
// sequential pass sums into a_dst. Nothing is added atomically.
#include <algorithm>
#include <vector>

#include "attention_parts.h"
#include "exp.h"
#include "isa.h"
#include "ranges.h"
#include "simd.h"

#define PH_COMMON_ARGS                                                                                               \
  int64_t wide, int64_t num_dst, int64_t num_src, int64_t dst_start, const void *x, int64_t type, int64_t heads,      \
      int64_t channels, const void *a_src, const void *a_dst, double slope, int64_t self_loop, const int64_t *src_ids, \
      const int64_t *keys, int64_t limit
#define PH_FORWARD_ARGS                                                                                             \
  (const int64_t* indptr, const void* indices, PH_COMMON_ARGS, void* out, void* top, void* inverse, int64_t threads)
#define PH_BACKWARD_ARGS                                                                                            \
  (const int64_t* indptr, const int64_t* t_indptr, const void* t_indices, const void* t_edge, PH_COMMON_ARGS,         \
   const void* out, const void* top, const void* inverse, const void* grad, void* facts, void* edge_grad,             \
   void* own_grad, void* x_grad, void* src_grad, void* dst_grad, int64_t threads)

PH_DECLARE(int64_t, attention, PH_FORWARD_ARGS)
PH_DECLARE(int64_t, attention_backward, PH_BACKWARD_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kGroup = 16;  // edges whose weights are computed together in the backward pass

// Buffers of one thread for one destination's edges.
template <class A>
struct Scratch {
  std::vector<int64_t> source;
  std::vector<uint64_t> src_id, dst_id;
  std::vector<A> weight, sum;
};

// weight[k, first .. first + H) = score less the largest score of the n edges, which goes to top.
template <int H, class T>
void scores(const Common<T>& t, const int64_t* source, int64_t n, int64_t i, int64_t first, Sum<T>* weight,
            Sum<T>* top) {
  using A = Sum<T>;
  using V = Heads<A, H>;
  const int64_t stride = t.heads;
  weight += first;
  const V a_dst = heads_at<H>(t.a_dst + i * stride + first);
  V most = {};
  for (int64_t k = 0; k < n; ++k) {
    const V z = heads_at<H>(t.a_src + source[k] * stride + first) + a_dst;
    const V score = leaky(z, t.slope);
    most = k == 0 ? score : larger(score, most);
    put_heads(weight + k * stride, score);
  }
  for (int64_t k = 0; k < n; ++k) put_heads(weight + k * stride, heads_at<H>(weight + k * stride) - most);
  put_heads(top + first, most);
}

// weight[k, first .. first + H) over its sum.
template <int H, class A>
void normalise(int64_t n, int64_t stride, int64_t first, A* weight, A* inverse) {
  using V = Heads<A, H>;
  weight += first;
  V sum = {};
  for (int64_t k = 0; k < n; ++k) sum += heads_at<H>(weight + k * stride);
  const V one_over = A(1) / sum;
  for (int64_t k = 0; k < n; ++k) put_heads(weight + k * stride, heads_at<H>(weight + k * stride) * one_over);
  put_heads(inverse + first, one_over);
}

template <class T, class I>
void one_destination(const Common<T>& t, const I* indices, int64_t begin, int64_t end, int64_t num_edges, int64_t i,
                     Scratch<Sum<T>>& s, T* out, Sum<T>* top, Sum<T>* inverse) {
  using A = Sum<T>;
  const int64_t H = t.heads, own = i + t.dst_start, most = end - begin + 1;
  if (int64_t(s.source.size()) < most) {
    s.source.resize(size_t(most));
    s.weight.resize(size_t(most * H));
  }
  int64_t n = 0;
  for (int64_t e = begin; e < end; ++e) {
    if (e + kGroup < num_edges) __builtin_prefetch(t.a_src + int64_t(indices[e + kGroup]) * H);
    s.source[size_t(n)] = indices[e];
    n += !(t.self_loop && indices[e] == own);
  }
  if (t.self_loop) s.source[size_t(n++)] = own;
  A* weight = s.weight.data();
  if (n == 0) {
    std::fill(top, top + H, A(0));
    std::fill(inverse, inverse + H, A(0));
    std::memset(static_cast<void*>(out), 0, size_t(t.width()) * sizeof(T));
    return;
  }
  with_heads(H, [&](auto together) {
    constexpr int N = decltype(together)::value;
    for (int64_t h = 0; h < H; h += N) scores<N>(t, s.source.data(), n, i, h, weight, top);
    exp_all(weight, n * H);
    for (int64_t h = 0; h < H; h += N) normalise<N>(n, H, h, weight, inverse);
  });
  if (t.keys) {
    s.src_id.resize(size_t(n));
    for (int64_t k = 0; k < n; ++k) s.src_id[size_t(k)] = t.id(s.source[size_t(k)]);
    s.dst_id.assign(size_t(n), t.id(own));
    mask(t, s.dst_id.data(), s.src_id.data(), n, weight);
  }
  const Edges<I> edges{s.source.data(), n, indices + begin, num_edges - begin};
  if (sum_by_tiles<false>(t.x, H, t.channels, edges, weight, out)) return;
  std::fill(s.sum.begin(), s.sum.end(), A(0));
  sum_by_rows(t.x, H, t.channels, edges, weight, s.sum.data());
  for (int64_t c = 0; c < t.width(); ++c) put(out + c, s.sum[size_t(c)]);
}

template <class T, class I>
void forward(const Common<T>& t, const int64_t* indptr, const I* indices, T* out, Sum<T>* top, Sum<T>* inverse,
             int threads) {
  const int64_t width = t.width(), H = t.heads;
  if (width == 0) return;
  const int64_t grain = std::max<int64_t>(64, (int64_t(1) << 20) / width);
  for_rows(indptr, t.num_dst, grain, threads, [&](int64_t begin, int64_t end) {
    Scratch<Sum<T>> scratch;
    scratch.sum.resize(size_t(width));
    for (int64_t i = begin; i < end; ++i)
      one_destination(t, indices, indptr[i], indptr[i + 1], indptr[t.num_dst], i, scratch, out + i * width,
                      top + i * H, inverse + i * H);
  });
}

template <class T, class I>
struct Backward {
  using A = Sum<T>;
  Common<T> t;
  const int64_t *indptr, *t_indptr;
  const I *t_indices, *t_edge;
  const T *out, *grad;
  const A *top, *inverse;
  A* facts;  // [D, 4, H]: a_dst, top, inverse, <grad, out> side by side, so that an edge reads them at once
  A *edge_grad, *own_grad;
  T* x_grad;
  A *src_grad, *dst_grad;

  void gather_facts(int threads) const {
    const int64_t H = t.heads, C = t.channels, width = t.width();
    parallel_for(t.num_dst, std::max<int64_t>(16, (1 << 15) / width), threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        A* fact = facts + i * 4 * H;
        for (int64_t h = 0; h < H; ++h) {
          fact[h] = t.a_dst[i * H + h];
          fact[H + h] = top[i * H + h];
          fact[2 * H + h] = inverse[i * H + h];
          fact[3 * H + h] = dot(grad + i * width + h * C, out + i * width + h * C, C);
        }
      }
    });
  }

  // n <= kGroup edges from source s to the given destinations; adds to sum (gradient of x) and src (of a_src).
  void group(int64_t s, const int64_t* dst, A* const* slot, int64_t n, A* weight, A* kept, A* sum, A* src) const {
    const int64_t H = t.heads, C = t.channels, width = t.width();
    const T* x = t.x + s * width;
    for (int64_t k = 0; k < n; ++k)
      for (int64_t h = 0; h < H; ++h) slot[k][h] = dot(grad + dst[k] * width + h * C, x + h * C, C);
    std::fill(kept, kept + n * H, A(1));
    if (t.keys) {
      uint64_t src_id[kGroup], dst_id[kGroup];
      for (int64_t k = 0; k < n; ++k) src_id[k] = t.id(s), dst_id[k] = t.id(dst[k] + t.dst_start);
      mask(t, dst_id, src_id, n, kept);
    }
    with_heads(H, [&](auto together) {
      constexpr int N = decltype(together)::value;
      for (int64_t h = 0; h < H; h += N) exponents<N>(s, dst, n, h, weight);
      exp_all(weight, n * H);
      for (int64_t h = 0; h < H; h += N) pushes<N>(s, dst, slot, n, h, weight, kept, src);
    });
    const Edges<I> edges{dst, n, nullptr, 0};
    if (!sum_by_tiles<true>(grad, H, C, edges, weight, sum)) sum_by_rows(grad, H, C, edges, weight, sum);
  }

  template <int N>
  void exponents(int64_t s, const int64_t* dst, int64_t n, int64_t h, A* weight) const {
    const int64_t H = t.heads;
    const auto a_src = heads_at<N>(t.a_src + s * H + h);
    for (int64_t k = 0; k < n; ++k) {
      const A* fact = facts + dst[k] * 4 * H + h;
      put_heads(weight + k * H + h, leaky(a_src + heads_at<N>(fact), t.slope) - heads_at<N>(fact + H));
    }
  }

  // Turns each slot from <grad, x> into the score's gradient, and each weight into what multiplies grad.
  template <int N>
  void pushes(int64_t s, const int64_t* dst, A* const* slot, int64_t n, int64_t h, A* weight, const A* kept,
              A* src) const {
    const int64_t H = t.heads;
    const auto a_src = heads_at<N>(t.a_src + s * H + h);
    auto total = heads_at<N>(src + h);
    for (int64_t k = 0; k < n; ++k) {
      const A* fact = facts + dst[k] * 4 * H + h;
      const auto share = heads_at<N>(weight + k * H + h) * heads_at<N>(fact + 2 * H), keep = heads_at<N>(kept + k * H + h);
      const auto push = share * (heads_at<N>(slot[k] + h) * keep - heads_at<N>(fact + 3 * H));
      const auto score = a_src + heads_at<N>(fact) > A(0) ? push : t.slope * push;
      put_heads(slot[k] + h, score);
      put_heads(weight + k * H + h, share * keep);
      total += score;
    }
    put_heads(src + h, total);
  }

  void sources(int threads) const {
    const int64_t H = t.heads, width = t.width(), num_edges = t_indptr[t.num_src];
    const int64_t grain = std::max<int64_t>(64, (int64_t(1) << 20) / width);
    const int fact_lines = lines_of(4 * H * int64_t(sizeof(A))), row_lines = lines_of(width * int64_t(sizeof(T)));
    for_rows(t_indptr, t.num_src, grain, threads, [&](int64_t begin, int64_t end) {
      std::vector<A> weight(size_t(kGroup * H)), kept(size_t(kGroup * H)), sum(static_cast<size_t>(width));
      int64_t dst[kGroup];
      A* slot[kGroup];
      for (int64_t s = begin; s < end; ++s) {
        std::fill(sum.begin(), sum.end(), A(0));
        A* src = src_grad + s * H;
        std::fill(src, src + H, A(0));
        const int64_t own = s - t.dst_start;
        const bool has_own = t.self_loop && own >= 0 && own < t.num_dst;
        int64_t n = 0;
        for (int64_t e = t_indptr[s]; e < t_indptr[s + 1]; ++e) {
          const int64_t i = t_indices[e];
          A* at = edge_grad + int64_t(t_edge[e]) * H;
          if (has_own && i == own) {
            std::fill(at, at + H, A(0));
            continue;
          }
          dst[n] = i, slot[n] = at;
          __builtin_prefetch(at, 1);
          if (e + kGroup < num_edges) {
            const int64_t soon = t_indices[e + kGroup];
            prefetch(facts + soon * 4 * H, fact_lines);
            prefetch(grad + soon * width, row_lines);
          }
          if (++n == kGroup) group(s, dst, slot, n, weight.data(), kept.data(), sum.data(), src), n = 0;
        }
        if (has_own) dst[n] = own, slot[n] = own_grad + own * H, ++n;
        if (n) group(s, dst, slot, n, weight.data(), kept.data(), sum.data(), src);
        for (int64_t c = 0; c < width; ++c) put(x_grad + s * width + c, sum[size_t(c)]);
      }
    });
  }

  void destinations(int threads) const {
    const int64_t H = t.heads;
    for_rows(indptr, t.num_dst, std::max<int64_t>(64, (1 << 16) / H), threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        A* to = dst_grad + i * H;
        std::fill(to, to + H, A(0));
        for (int64_t e = indptr[i]; e < indptr[i + 1]; ++e)
          for (int64_t h = 0; h < H; ++h) to[h] += edge_grad[e * H + h];
        if (t.self_loop)
          for (int64_t h = 0; h < H; ++h) to[h] += own_grad[i * H + h];
      }
    });
  }
};

#define PH_COMMON(T)                                                                                                \
  Common<T> {                                                                                                       \
    num_dst, num_src, dst_start, static_cast<const T*>(x), heads, channels, static_cast<const Sum<T>*>(a_src),       \
        static_cast<const Sum<T>*>(a_dst), Sum<T>(slope), self_loop != 0, src_ids,                                   \
        reinterpret_cast<const uint64_t*>(keys), limit                                                              \
  }

}  // namespace

int64_t attention PH_FORWARD_ARGS {
#define PH_RUN(I)                                                                                           \
  PH_ROW_TYPES(type, using A = Sum<T>;                                                                       \
               forward(PH_COMMON(T), indptr, static_cast<const I*>(indices), static_cast<T*>(out),            \
                       static_cast<A*>(top), static_cast<A*>(inverse), int(threads)))
  if (wide) {
    PH_RUN(int64_t)
  } else {
    PH_RUN(int32_t)
  }
#undef PH_RUN
  return 0;
}

int64_t attention_backward PH_BACKWARD_ARGS {
#define PH_RUN(I)                                                                                                   \
  PH_ROW_TYPES(type, using A = Sum<T>; if (heads * channels == 0) return 0;                                          \
               const Backward<T, I> back{PH_COMMON(T), indptr, t_indptr, static_cast<const I*>(t_indices),            \
                                         static_cast<const I*>(t_edge), static_cast<const T*>(out),                  \
                                         static_cast<const T*>(grad), static_cast<const A*>(top),                    \
                                         static_cast<const A*>(inverse), static_cast<A*>(facts),                     \
                                         static_cast<A*>(edge_grad), static_cast<A*>(own_grad),                      \
                                         static_cast<T*>(x_grad), static_cast<A*>(src_grad),                         \
                                         static_cast<A*>(dst_grad)};                                                 \
               back.gather_facts(int(threads)); back.sources(int(threads)); back.destinations(int(threads)))
  if (wide) {
    PH_RUN(int64_t)
  } else {
    PH_RUN(int32_t)
  }
#undef PH_RUN
  return 0;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_attention PH_FORWARD_ARGS {
  return PH_PICK(attention)(indptr, indices, wide, num_dst, num_src, dst_start, x, type, heads, channels, a_src, a_dst,
                            slope, self_loop, src_ids, keys, limit, out, top, inverse, threads);
}
PH_EXPORT int64_t ph_attention_backward PH_BACKWARD_ARGS {
  return PH_PICK(attention_backward)(indptr, t_indptr, t_indices, t_edge, wide, num_dst, num_src, dst_start, x, type,
                                     heads, channels, a_src, a_dst, slope, self_loop, src_ids, keys, limit, out, top,
                                     inverse, grad, facts, edge_grad, own_grad, x_grad, src_grad, dst_grad, threads);
}
#endif
