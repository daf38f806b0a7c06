// Synthetic graphs: pairs drawn by number, turned into sorted, duplicate-free, symmetric in-edge lists; feature rows.
//
// Pair e is a pure function of (key, e), so any thread may draw it, and it may be drawn twice: once to count list lengths,
// once to fill the lists. Nothing but the lists themselves is stored. Threads fill a list in any order; the sort that
// follows takes that order away. Only +, -, *, / and comparisons of IEEE doubles decide a draw, so every machine agrees.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "isa.h"
#include "philox.h"
#include "pool.h"

#ifndef PH_SYNTH_RECIPE
#define PH_SYNTH_RECIPE
namespace polyhop {

// Mirrors _Recipe in kernels/synth.py.
struct Recipe {
  uint64_t key;
  int64_t num_nodes;
  int64_t num_pairs;
  int32_t kind;            // 0 communities, 1 R-MAT
  int32_t power;           // communities: rank = n * u^power, so the degree exponent is 2 + 1/(power - 1)
  int32_t num_classes;     // communities
  int32_t levels;          // R-MAT: bits of a position
  uint32_t cuts[3];        // 16-bit thresholds. communities: same group, same class; R-MAT: a, a + b, a + b + c
  uint32_t pad;
  double class_floor;      // where the power law is cut off for hubs, see rank()
  double group_floor;
  const uint16_t* class_table;  // [65536] class of a 16-bit draw
  const int64_t* class_start;   // [C + 1] first position of each class
  const int64_t* num_groups;    // [C]
  const int32_t* node_of;       // [N] node id of each position
};

}  // namespace polyhop
#endif

PH_DECLARE(void, synth_permutation, (uint64_t key, int64_t n, int32_t* out, int threads))
PH_DECLARE(int64_t, synth_count, (const polyhop::Recipe* recipe, int64_t* indptr, int threads))
PH_DECLARE(void, synth_fill, (const polyhop::Recipe* recipe, int64_t* indptr, int32_t* indices, int threads))
PH_DECLARE(int64_t, synth_tidy,
           (uint64_t key, int64_t n, int64_t wanted, int64_t* indptr, int32_t* indices, int threads))
PH_DECLARE(void, synth_rows,
           (uint64_t key, int64_t start, int64_t n, int64_t width, const int64_t* klass, const float* centres, float* out,
            int threads))

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int kLanes = 16;  // Philox calls made together, so that the compiler fills vector registers

struct Lanes {
  uint32_t w[4][kLanes];
};

// Words of counters (id + i * id_step, other + i * other_step) for i in 0..kLanes-1.
inline void philox_lanes(uint64_t key, uint64_t id, uint64_t id_step, uint64_t other, uint64_t other_step, Lanes& out) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t a = id + i * id_step, b = other + i * other_step;
    c0[i] = uint32_t(a), c1[i] = uint32_t(a >> 32), c2[i] = uint32_t(b), c3[i] = uint32_t(b >> 32);
  }
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t p0 = uint64_t(kPhiloxM0) * c0[i], p1 = uint64_t(kPhiloxM1) * c2[i];
      const uint32_t n0 = uint32_t(p1 >> 32) ^ c1[i] ^ k0, n2 = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = uint32_t(p1), c3[i] = uint32_t(p0), c0[i] = n0, c2[i] = n2;
    }
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  for (int i = 0; i < kLanes; ++i) out.w[0][i] = c0[i], out.w[1][i] = c1[i], out.w[2][i] = c2[i], out.w[3][i] = c3[i];
}

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// A keyed bijection of [0, n): four Feistel rounds over the next even number of bits, repeated until inside the range.
struct Bijection {
  uint64_t key, n, mask;
  int half;
  Bijection(uint64_t key_, int64_t n_) : key(key_), n(uint64_t(n_)), half(1) {
    while ((uint64_t(1) << (2 * half)) < n) ++half;
    mask = (uint64_t(1) << half) - 1;
  }
  uint64_t operator()(uint64_t v) const {
    do {
      uint64_t left = v >> half, right = v & mask;
      for (uint64_t round = 0; round < 4; ++round) {
        const uint64_t next = left ^ (mix(key + (right << 3) + round) & mask);
        left = right;
        right = next;
      }
      v = (left << half) | right;
    } while (v >= n);
    return v;
  }
};

// Rank in 0..n-1 with P(rank < r) = ((r/n)(1 - f^k) + f^k)^(1/k): a power law whose hubs are cut off by the floor f.
inline int64_t rank(uint32_t word, int64_t n, int power, double floor) {
  const double z = floor + (double(word) + 0.5) * (1.0 / 4294967296.0) * (1.0 - floor);
  double top = z, cut = floor;
  for (int i = 1; i < power; ++i) top *= z, cut *= floor;
  const int64_t r = int64_t((top - cut) / (1.0 - cut) * double(n));
  return r < n ? r : n - 1;
}

struct Pair {
  int64_t u, v;
};

inline Pair community_pair(const Recipe& r, uint64_t e, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  const int c = r.class_table[w0 >> 16];
  const uint32_t where = w0 & 0xffff;
  const int64_t start = r.class_start[c], n = r.class_start[c + 1] - start;
  if (where < r.cuts[0]) {  // both in one group: ranks g, g + G, g + 2G, ... of the class
    const int64_t groups = r.num_groups[c], g = int64_t((uint64_t(w1) * uint64_t(groups)) >> 32);
    const int64_t size = (n - g + groups - 1) / groups;
    return {start + rank(w2, size, r.power, r.group_floor) * groups + g,
            start + rank(w3, size, r.power, r.group_floor) * groups + g};
  }
  const int64_t u = start + rank(w1, n, r.power, r.class_floor);
  int d = c;
  if (where >= r.cuts[1] && r.num_classes > 1) {
    d = r.class_table[w2 >> 16];
    for (uint64_t again = 1; d == c; ++again) d = r.class_table[philox(r.key, e, again).w[0] >> 16];
  }
  return {u, r.class_start[d] + rank(w3, r.class_start[d + 1] - r.class_start[d], r.power, r.class_floor)};
}

inline void rmat_level(const Recipe& r, uint32_t lane, Pair& p) {
  const bool right = (lane >= r.cuts[0] && lane < r.cuts[1]) || lane >= r.cuts[2];
  p.u = 2 * p.u + (lane >= r.cuts[1]);
  p.v = 2 * p.v + right;
}

// Calls push(node, node) for pairs [begin, end), loops left out, in groups so that push_hint may prefetch.
template <class Hint, class Push>
void each_pair(const Recipe& r, int64_t begin, int64_t end, const Hint& hint, const Push& push) {
  Lanes words;
  Pair pairs[kLanes];
  for (int64_t e = begin; e < end; e += kLanes) {
    const int lanes = int(std::min<int64_t>(kLanes, end - e));
    if (r.kind == 0) {
      philox_lanes(r.key, uint64_t(e), 1, 0, 0, words);
      for (int i = 0; i < lanes; ++i)
        pairs[i] = community_pair(r, uint64_t(e + i), words.w[0][i], words.w[1][i], words.w[2][i], words.w[3][i]);
    } else {
      for (int i = 0; i < lanes; ++i) pairs[i] = {0, 0};
      for (int level = 0; level < r.levels; ++level) {
        if (level % 8 == 0) philox_lanes(r.key, uint64_t(e), 1, uint64_t(level / 8), 0, words);
        const int word = (level % 8) / 2, shift = 16 * (level % 2);
        for (int i = 0; i < lanes; ++i) rmat_level(r, (words.w[word][i] >> shift) & 0xffff, pairs[i]);
      }
    }
    for (int i = 0; i < lanes; ++i) {
      pairs[i].u = r.node_of[pairs[i].u];
      pairs[i].v = r.node_of[pairs[i].v];
      hint(pairs[i].u);
      hint(pairs[i].v);
    }
    for (int i = 0; i < lanes; ++i)
      if (pairs[i].u != pairs[i].v) push(pairs[i].u, pairs[i].v);
  }
}

constexpr int64_t kPairGrain = 1 << 15;

inline uint64_t pair_hash(uint64_t key, int64_t a, int64_t b) {
  const uint64_t low = uint64_t(std::min(a, b)), high = uint64_t(std::max(a, b));
  return mix(mix(key + low) + high);
}

}  // namespace

void synth_permutation(uint64_t key, int64_t n, int32_t* out, int threads) {
  const Bijection bijection(key, n);
  parallel_for(n, 1 << 14, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = int32_t(bijection(uint64_t(i)));
  });
}

int64_t synth_count(const Recipe* recipe, int64_t* indptr, int threads) {
  const int64_t n = recipe->num_nodes;
  std::memset(indptr, 0, size_t(n + 1) * sizeof(int64_t));
  parallel_for(recipe->num_pairs, kPairGrain, threads, [&](int64_t begin, int64_t end) {
    each_pair(
        *recipe, begin, end, [&](int64_t v) { __builtin_prefetch(indptr + v, 1); },
        [&](int64_t u, int64_t v) {
          __atomic_fetch_add(indptr + u, 1, __ATOMIC_RELAXED);
          __atomic_fetch_add(indptr + v, 1, __ATOMIC_RELAXED);
        });
  });
  int64_t total = 0;
  for (int64_t v = 0; v <= n; ++v) {
    const int64_t count = indptr[v];
    indptr[v] = total;
    total += count;
  }
  return total;
}

void synth_fill(const Recipe* recipe, int64_t* indptr, int32_t* indices, int threads) {
  parallel_for(recipe->num_pairs, kPairGrain, threads, [&](int64_t begin, int64_t end) {
    each_pair(
        *recipe, begin, end, [&](int64_t v) { __builtin_prefetch(indptr + v, 1); },
        [&](int64_t u, int64_t v) {
          indices[__atomic_fetch_add(indptr + u, 1, __ATOMIC_RELAXED)] = int32_t(v);
          indices[__atomic_fetch_add(indptr + v, 1, __ATOMIC_RELAXED)] = int32_t(u);
        });
  });
  // Each start has moved to the next list's start: shift them back.
  for (int64_t v = recipe->num_nodes; v > 0; --v) indptr[v] = indptr[v - 1];
  indptr[0] = 0;
}

// Sorts every list, drops repeated entries, then drops pairs of smallest keyed hash until `wanted` entries remain (< 0: keep
// all). Lists are packed in place; returns the entries left, which may be fewer than wanted.
int64_t synth_tidy(uint64_t key, int64_t n, int64_t wanted, int64_t* indptr, int32_t* indices, int threads) {
  constexpr int kBits = 12;
  constexpr int64_t kGrain = 1 << 12;
  std::vector<int64_t> length(static_cast<size_t>(n));
  std::vector<std::atomic<int64_t>> histogram(size_t(1) << kBits);
  for (auto& h : histogram) h.store(0, std::memory_order_relaxed);
  std::atomic<int64_t> entries{0};
  parallel_for(n, kGrain, threads, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> local(size_t(1) << kBits, 0);
    int64_t left = 0;
    for (int64_t v = begin; v < end; ++v) {
      int32_t *first = indices + indptr[v], *last = indices + indptr[v + 1];
      std::sort(first, last);
      length[size_t(v)] = std::unique(first, last) - first;
      left += length[size_t(v)];
      if (wanted < 0) continue;
      for (int32_t* u = first; u < first + length[size_t(v)] && *u < v; ++u) ++local[pair_hash(key, *u, v) >> (64 - kBits)];
    }
    entries.fetch_add(left, std::memory_order_relaxed);
    if (wanted >= 0)
      for (size_t b = 0; b < local.size(); ++b)
        if (local[b]) histogram[b].fetch_add(local[b], std::memory_order_relaxed);
  });

  int64_t surplus = wanted < 0 ? 0 : std::max<int64_t>(0, (entries.load() - wanted) / 2);
  uint64_t threshold = 0;  // pairs with a hash below it go
  if (surplus > 0) {
    uint64_t bucket = 0;
    while (surplus > histogram[bucket].load()) surplus -= histogram[bucket++].load();
    std::vector<std::vector<uint64_t>> found(size_t((n + kGrain - 1) / kGrain));
    parallel_for(n, kGrain, threads, [&](int64_t begin, int64_t end) {
      auto& mine = found[size_t(begin / kGrain)];
      for (int64_t v = begin; v < end; ++v)
        for (int64_t i = indptr[v]; i < indptr[v] + length[size_t(v)] && indices[i] < v; ++i) {
          const uint64_t hash = pair_hash(key, indices[i], v);
          if (hash >> (64 - kBits) == bucket) mine.push_back(hash);
        }
    });
    std::vector<uint64_t> hashes;
    for (const auto& mine : found) hashes.insert(hashes.end(), mine.begin(), mine.end());
    std::nth_element(hashes.begin(), hashes.begin() + (surplus - 1), hashes.end());
    threshold = hashes[size_t(surplus - 1)] + 1;
    parallel_for(n, kGrain, threads, [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) {
        int32_t* first = indices + indptr[v];
        length[size_t(v)] = std::remove_if(first, first + length[size_t(v)],
                                           [&](int32_t u) { return pair_hash(key, u, v) < threshold; }) - first;
      }
    });
  }

  int64_t at = 0;
  for (int64_t v = 0; v < n; ++v) {
    std::memmove(indices + at, indices + indptr[v], size_t(length[size_t(v)]) * sizeof(int32_t));
    indptr[v] = at;
    at += length[size_t(v)];
  }
  indptr[n] = at;
  return at;
}

// out[i] = centres[klass[i]] + noise(start + i): noise is the sum of four uniform bytes, centred, of unit variance. klass[i] < 0
// or no centres: noise alone.
void synth_rows(uint64_t key, int64_t start, int64_t n, int64_t width, const int64_t* klass, const float* centres, float* out,
                int threads) {
  constexpr float kUnit = 1.0f / 147.80054f;  // standard deviation of the sum: sqrt(4 * (256^2 - 1) / 12)
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(width, 1));
  parallel_for(n, grain, threads, [&](int64_t begin, int64_t end) {
    Lanes words;
    float noise[4 * kLanes];
    for (int64_t i = begin; i < end; ++i) {
      const float* centre = centres && klass && klass[i] >= 0 ? centres + klass[i] * width : nullptr;
      for (int64_t column = 0; column < width; column += 4 * kLanes) {
        philox_lanes(key, uint64_t(start + i), 0, uint64_t(column / 4), 1, words);
        for (int k = 0; k < 4; ++k)
          for (int lane = 0; lane < kLanes; ++lane) {
            const uint32_t w = words.w[k][lane];
            const int32_t sum = int32_t((w & 0xff) + ((w >> 8) & 0xff) + ((w >> 16) & 0xff) + (w >> 24)) - 510;
            noise[4 * lane + k] = float(sum) * kUnit;
          }
        const int64_t columns = std::min<int64_t>(4 * kLanes, width - column);
        float* row = out + i * width + column;
        if (centre)
          for (int64_t k = 0; k < columns; ++k) row[k] = noise[k] + centre[column + k];
        else
          for (int64_t k = 0; k < columns; ++k) row[k] = noise[k];
      }
    }
  });
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
using polyhop::Recipe;

PH_EXPORT void ph_synth_permutation(uint64_t key, int64_t n, int32_t* out, int64_t threads) {
  PH_PICK(synth_permutation)(key, n, out, int(threads));
}

PH_EXPORT int64_t ph_synth_count(const Recipe* recipe, int64_t* indptr, int64_t threads) {
  return PH_PICK(synth_count)(recipe, indptr, int(threads));
}

PH_EXPORT void ph_synth_fill(const Recipe* recipe, int64_t* indptr, int32_t* indices, int64_t threads) {
  PH_PICK(synth_fill)(recipe, indptr, indices, int(threads));
}

PH_EXPORT int64_t ph_synth_tidy(uint64_t key, int64_t n, int64_t wanted, int64_t* indptr, int32_t* indices, int64_t threads) {
  return PH_PICK(synth_tidy)(key, n, wanted, indptr, indices, int(threads));
}

PH_EXPORT void ph_synth_rows(uint64_t key, int64_t start, int64_t n, int64_t width, const int64_t* klass,
                             const float* centres, float* out, int64_t threads) {
  PH_PICK(synth_rows)(key, start, n, width, klass, centres, out, int(threads));
}
#endif
