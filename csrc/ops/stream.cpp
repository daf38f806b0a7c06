// Streaming partitioning: nodes come in order and each joins the part where it has most neighbours, less what the part's
// load costs; or, to form clusters, the neighbours' part that pulls most. One thread: a node's choice depends on all before
// it. Further passes place every node anew.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "isa.h"

#define PH_ARGS                                                                                                    \
  (const int64_t* indptr, const void* indices, int64_t wide, int64_t num_rows, const int64_t* order, int64_t first, \
   int64_t num_parts, const double* weight, const double* second, double capacity, double second_capacity,         \
   int64_t rule, double alpha, int32_t* owner, double* load, double* second_load, const float* edge_weight)

PH_DECLARE(int64_t, stream_parts, PH_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kFennel = 0, kCluster = 2;

// What a part's load takes away: fennel subtracts the marginal cost of a power of the load, ldg multiplies by the room left.
// A load that is 0 may have been rounded to less.
inline double price(int64_t rule, double alpha, double load, double capacity) {
  return rule == kFennel ? alpha * 1.5 * std::sqrt(std::max(load, 0.0)) : 1.0 - load / capacity;
}

// The parts' loads, and how near the row at hand is to each of them.
struct Parts {
  int64_t rule, num_parts;
  double alpha, capacity, second_capacity;
  double *load, *second_load;
  std::vector<double> near, cost;
  std::vector<int32_t> touched;    // by clusters: parts with neighbours, by first appearance
  std::vector<int32_t> even, odd;  // otherwise: neighbours of 1 each in two sums that do not wait for each other, from part -1

  void add(int64_t p, double w, double s) {
    load[p] += w;
    if (s != 0) second_load[p] += s;
    if (rule != kCluster) cost[size_t(p)] = price(rule, alpha, load[p], capacity);
  }

  bool fits(int64_t p, double w, double s) const {
    return load[p] + w <= capacity && (s <= 0 || second_load[p] + s <= second_capacity);
  }

  // Best part with room for both; if none has, the one least over.
  int64_t best_of_all(double w, double s) const {
    int64_t best = -1;
    double top = 0;
    for (int64_t p = 0; p < num_parts; ++p) {
      if (!fits(p, w, s)) continue;
      const double score = rule == kFennel ? near[size_t(p)] - cost[size_t(p)] : (near[size_t(p)] + 1e-9) * cost[size_t(p)];
      if (best < 0 || score > top || (score == top && load[p] < load[best])) best = p, top = score;
    }
    return best < 0 ? emptiest(w, s) : best;
  }

  int64_t emptiest(double w, double s) const {
    int64_t best = 0;
    double least = 0;
    for (int64_t p = 0; p < num_parts; ++p) {
      const double full = std::max((load[p] + w) / capacity, s > 0 ? (second_load[p] + s) / second_capacity : 0.0);
      if (p == 0 || full < least) best = p, least = full;
    }
    return best;
  }

  // Own part, or a neighbour's with room that pulls more: neighbours over the root of the load, compared as squares.
  int64_t best_beside(int64_t own, double w, double s) const {
    int64_t best = own;
    double top = near[size_t(own)] * near[size_t(own)], load_of_top = load[own] + w;
    for (const int32_t p : touched) {
      if (!fits(p, w, s)) continue;
      const double now = load[p] + w;
      const double here = near[size_t(p)] * near[size_t(p)], one = here * load_of_top, other = top * now;
      if (one > other || (one == other && now < load_of_top)) best = p, top = here, load_of_top = now;
    }
    return best;
  }
};

// The rows of one piece and where their nodes are.
template <class I>
struct Rows {
  const int64_t* indptr;
  const I* indices;
  const float* edge_weight;
  const int32_t* owner;
  int64_t num_edges;

  // Neighbours of node v are read from memory in no order: ask for those of a few edges on early.
  static constexpr int64_t kOwners = 64, kLoads = 24;

  int32_t part(int64_t e, int64_t v) const {
    __builtin_prefetch(owner + indices[std::min(e + kOwners, num_edges - 1)]);
    return int64_t(indices[e]) == v ? -1 : owner[indices[e]];
  }

  void add_all(int64_t row, int64_t v, Parts& parts) const {
    if (edge_weight) {
      for (int64_t e = indptr[row]; e < indptr[row + 1]; ++e) {
        const int32_t p = part(e, v);
        if (p >= 0) parts.near[size_t(p)] += double(edge_weight[e]);
      }
      return;
    }
    int64_t e = indptr[row];
    for (; e + 1 < indptr[row + 1]; e += 2) {
      ++parts.even[size_t(part(e, v) + 1)];
      ++parts.odd[size_t(part(e + 1, v) + 1)];
    }
    if (e < indptr[row + 1]) ++parts.even[size_t(part(e, v) + 1)];
    for (int64_t p = 0; p < parts.num_parts; ++p) {
      parts.near[size_t(p)] = double(parts.even[size_t(p + 1)] + parts.odd[size_t(p + 1)]);
      parts.even[size_t(p + 1)] = parts.odd[size_t(p + 1)] = 0;
    }
  }

  void add_touched(int64_t row, int64_t v, Parts& parts) const {
    for (int64_t e = indptr[row]; e < indptr[row + 1]; ++e) {
      const int32_t soon = std::max(owner[indices[std::min(e + kLoads, num_edges - 1)]], 0);
      __builtin_prefetch(&parts.near[size_t(soon)]);
      __builtin_prefetch(parts.load + soon);
      const int32_t p = part(e, v);
      if (p < 0) continue;
      double& near = parts.near[size_t(p)];
      if (near == 0) parts.touched.push_back(p);
      near += edge_weight ? double(edge_weight[e]) : 1.0;
    }
  }
};

template <class I>
int64_t stream(const Rows<I>& rows, int64_t num_rows, const int64_t* order, int64_t first, const double* weight,
               const double* second, int32_t* owner, Parts& parts) {
  int64_t moved = 0;
  for (int64_t k = 0; k < num_rows; ++k) {
    const int64_t row = order ? order[k] : k, v = first + row;
    const double w = weight ? weight[row] : 1.0, s = second ? second[row] : 0.0;
    const int32_t was = owner[v];
    if (was >= 0) parts.add(was, -w, -s);
    int64_t best;
    if (parts.rule == kCluster) {
      rows.add_touched(row, v, parts);
      best = parts.best_beside(was, w, s);
      for (const int32_t p : parts.touched) parts.near[size_t(p)] = 0.0;
      parts.touched.clear();
    } else {
      rows.add_all(row, v, parts);
      best = parts.best_of_all(w, s);
      if (rows.edge_weight) std::fill(parts.near.begin(), parts.near.end(), 0.0);
    }
    owner[v] = int32_t(best);
    parts.add(best, w, s);
    moved += best != was;
  }
  return moved;
}

}  // namespace

int64_t stream_parts PH_ARGS {
  Parts parts{rule, num_parts, alpha, capacity, second_capacity, load, second_load, {}, {}, {}, {}, {}};
  parts.near.assign(size_t(num_parts), 0.0);
  if (rule != kCluster) {
    parts.even.assign(size_t(num_parts + 1), 0);
    parts.odd.assign(size_t(num_parts + 1), 0);
    parts.cost.resize(size_t(num_parts));
    for (int64_t p = 0; p < num_parts; ++p) parts.cost[size_t(p)] = price(rule, alpha, load[p], capacity);
  }
  const int64_t num_edges = indptr[num_rows];
  if (wide) {
    const Rows<int64_t> rows{indptr, static_cast<const int64_t*>(indices), edge_weight, owner, num_edges};
    return stream(rows, num_rows, order, first, weight, second, owner, parts);
  }
  const Rows<int32_t> rows{indptr, static_cast<const int32_t*>(indices), edge_weight, owner, num_edges};
  return stream(rows, num_rows, order, first, weight, second, owner, parts);
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
// Places rows [first, first + num_rows) of a graph of which `owner` (-1 = not placed) covers all; returns how many moved.
PH_EXPORT int64_t ph_stream_parts PH_ARGS {
  return PH_PICK(stream_parts)(indptr, indices, wide, num_rows, order, first, num_parts, weight, second, capacity,
                               second_capacity, rule, alpha, owner, load, second_load, edge_weight);
}
#endif
