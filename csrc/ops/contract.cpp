// A graph's groups as nodes: edges between two groups become one, their weights summed; edges inside a group go away.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa.h"

#define PH_ARGS                                                                                                       \
  (const int64_t* indptr, const void* indices, int64_t wide, const float* edge_weight, const int32_t* group,           \
   int64_t num_groups, const int64_t* bounds, const int64_t* members, int64_t* out_indptr, int32_t* out_indices,       \
   float* out_weight)

PH_DECLARE(int64_t, contract, PH_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kAhead = 4;  // rows

template <class I>
int64_t contract_all(const int64_t* indptr, const I* indices, const float* edge_weight, const int32_t* group,
                     int64_t num_groups, const int64_t* bounds, const int64_t* members, int64_t* out_indptr,
                     int32_t* out_indices, float* out_weight) {
  std::vector<double> sum(std::size_t(num_groups), 0.0);
  std::vector<int32_t> touched;
  int64_t n = 0;
  out_indptr[0] = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    for (int64_t k = bounds[g]; k < bounds[g + 1]; ++k) {
      const int64_t row = members[k];
      if (k + kAhead < bounds[num_groups]) {  // rows of a group lie anywhere
        const int64_t soon = indptr[members[k + kAhead]];
        __builtin_prefetch(indices + soon);
        __builtin_prefetch(indptr + members[k + 2 * kAhead < bounds[num_groups] ? k + 2 * kAhead : k]);
      }
      for (int64_t e = indptr[row]; e < indptr[row + 1]; ++e) {
        const int32_t other = group[indices[e]];
        if (other == g) continue;
        double& to = sum[std::size_t(other)];
        if (to == 0) touched.push_back(other);
        to += edge_weight ? double(edge_weight[e]) : 1.0;
      }
    }
    for (const int32_t other : touched) {
      out_indices[n] = other;
      out_weight[n++] = float(sum[std::size_t(other)]);
      sum[std::size_t(other)] = 0.0;
    }
    touched.clear();
    out_indptr[g + 1] = n;
  }
  return n;
}

}  // namespace

int64_t contract PH_ARGS {
  if (wide)
    return contract_all(indptr, static_cast<const int64_t*>(indices), edge_weight, group, num_groups, bounds, members,
                        out_indptr, out_indices, out_weight);
  return contract_all(indptr, static_cast<const int32_t*>(indices), edge_weight, group, num_groups, bounds, members,
                      out_indptr, out_indices, out_weight);
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
// Rows of group g are members[bounds[g] .. bounds[g + 1]). Room for as many edges as there were; returns how many there are.
PH_EXPORT int64_t ph_contract PH_ARGS {
  return PH_PICK(contract)(indptr, indices, wide, edge_weight, group, num_groups, bounds, members, out_indptr, out_indices,
                           out_weight);
}
#endif
