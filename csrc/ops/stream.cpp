// Streaming partitioning: nodes come in order and each joins the part where it has most neighbours, less what the part's
// load costs. One thread: a node's choice depends on all before it. Further passes place every node anew.
#include <cmath>
#include <vector>

#include "isa.h"

#define PH_ARGS                                                                                                    \
  (const int64_t* indptr, const void* indices, int64_t wide, int64_t num_rows, const int64_t* order, int64_t first, \
   int64_t num_parts, const double* weight, const double* second, double capacity, double second_capacity,         \
   int64_t rule, double alpha, int32_t* owner, double* load, double* second_load)

PH_DECLARE(int64_t, stream_parts, PH_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kFennel = 0;

// What a part's load takes away: fennel subtracts the marginal cost of a power of the load, ldg multiplies by the room left.
inline double price(int64_t rule, double alpha, double load, double capacity) {
  return rule == kFennel ? alpha * 1.5 * std::sqrt(load) : 1.0 - load / capacity;
}

template <class I>
int64_t stream(const int64_t* indptr, const I* indices, int64_t num_rows, const int64_t* order, int64_t first,
               int64_t num_parts, const double* weight, const double* second, double capacity, double second_capacity,
               int64_t rule, double alpha, int32_t* owner, double* load, double* second_load) {
  std::vector<double> near(size_t(num_parts), 0.0), cost(size_t(num_parts), 0.0);
  for (int64_t p = 0; p < num_parts; ++p) cost[size_t(p)] = price(rule, alpha, load[p], capacity);
  int64_t moved = 0;
  constexpr int64_t kAhead = 8;
  for (int64_t k = 0; k < num_rows; ++k) {
    const int64_t row = order ? order[k] : k;
    if (k + kAhead < num_rows) {
      const int64_t soon = order ? order[k + kAhead] : k + kAhead;
      const int64_t end = std::min(indptr[soon + 1], indptr[soon] + 32);
      for (int64_t e = indptr[soon]; e < end; ++e) __builtin_prefetch(owner + indices[e]);
    }
    const int64_t v = first + row;
    const double w = weight ? weight[row] : 1.0, s = second ? second[row] : 0.0;
    const int32_t was = owner[v];
    if (was >= 0) {
      load[was] -= w;
      second_load[was] -= s;
      cost[size_t(was)] = price(rule, alpha, load[was], capacity);
    }
    for (int64_t e = indptr[row]; e < indptr[row + 1]; ++e) {
      const int64_t u = int64_t(indices[e]);
      if (u != v && owner[u] >= 0) near[size_t(owner[u])] += 1.0;
    }
    // Best part with room for both; if none has, the one least over.
    int64_t best = -1, emptiest = 0;
    double top = 0, least = 0;
    for (int64_t p = 0; p < num_parts; ++p) {
      const double full = std::max((load[p] + w) / capacity, s > 0 ? (second_load[p] + s) / second_capacity : 0.0);
      if (p == 0 || full < least) emptiest = p, least = full;
      if (full > 1.0) continue;
      const double score = rule == kFennel ? near[size_t(p)] - cost[size_t(p)] : (near[size_t(p)] + 1e-9) * cost[size_t(p)];
      if (best < 0 || score > top || (score == top && load[p] < load[best])) best = p, top = score;
    }
    if (best < 0) best = emptiest;
    for (int64_t e = indptr[row]; e < indptr[row + 1]; ++e) {
      const int64_t u = int64_t(indices[e]);
      if (owner[u] >= 0) near[size_t(owner[u])] = 0.0;
    }
    owner[v] = int32_t(best);
    load[best] += w;
    second_load[best] += s;
    cost[size_t(best)] = price(rule, alpha, load[best], capacity);
    moved += best != was;
  }
  return moved;
}

}  // namespace

int64_t stream_parts PH_ARGS {
  if (wide)
    return stream(indptr, static_cast<const int64_t*>(indices), num_rows, order, first, num_parts, weight, second, capacity,
                  second_capacity, rule, alpha, owner, load, second_load);
  return stream(indptr, static_cast<const int32_t*>(indices), num_rows, order, first, num_parts, weight, second, capacity,
                second_capacity, rule, alpha, owner, load, second_load);
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
// Places rows [first, first + num_rows) of a graph of which `owner` (-1 = not placed) covers all; returns how many moved.
PH_EXPORT int64_t ph_stream_parts PH_ARGS {
  return PH_PICK(stream_parts)(indptr, indices, wide, num_rows, order, first, num_parts, weight, second, capacity,
                               second_capacity, rule, alpha, owner, load, second_load);
}
#endif
