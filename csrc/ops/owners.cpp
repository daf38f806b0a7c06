// Nodes of several mini-batches by who owns them: one list for each owner, mini-batch after mini-batch.
#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "isa.h"

#define PH_OWNERS_ARGS                                                                                             \
  (const int64_t* ids, const int64_t* cuts, int64_t num_batches, const int64_t* bounds, int64_t num_parts, int64_t own, \
   int64_t is_sorted, int64_t* order, int64_t* rows, int64_t* counts)

PH_DECLARE(int64_t, by_owner, PH_OWNERS_ARGS)

namespace polyhop {
namespace PH_ISA {
namespace {

constexpr int64_t kNoMemory = -2;

}  // namespace

// ids[order] are by owner, then by mini-batch, then ascending (is_sorted) or as they came. rows: row within the owner, in that
// order, plus (mini-batch * nodes of the owner) for owners other than own. counts [parts, mini-batches]. The place of the
// first id that nobody owns, -1, or kNoMemory.
int64_t by_owner PH_OWNERS_ARGS {
  const auto owner = [&](int64_t id) { return std::upper_bound(bounds + 1, bounds + num_parts, id) - (bounds + 1); };
  try {
    std::fill(counts, counts + num_parts * num_batches, 0);
    for (int64_t m = 0; m < num_batches; ++m)
      for (int64_t i = cuts[m]; i < cuts[m + 1]; ++i) {
        if (ids[i] < bounds[0] || ids[i] >= bounds[num_parts]) return i;
        ++counts[owner(ids[i]) * num_batches + m];
      }
    std::vector<int64_t> next(size_t(num_parts * num_batches));
    int64_t total = 0;
    for (size_t s = 0; s < next.size(); ++s) {
      next[s] = total;
      total += counts[s];
    }
    std::vector<std::pair<int64_t, int64_t>> batch;  // id and place
    for (int64_t m = 0; m < num_batches; ++m) {
      batch.clear();
      for (int64_t i = cuts[m]; i < cuts[m + 1]; ++i) batch.emplace_back(ids[i], i);
      if (is_sorted) std::sort(batch.begin(), batch.end());
      for (const auto& [id, place] : batch) {
        const int64_t q = owner(id), at = next[size_t(q * num_batches + m)]++;
        const int64_t size = bounds[q + 1] - bounds[q];
        order[at] = place;
        rows[at] = id - bounds[q] + (q == own ? 0 : m * size);
      }
    }
    return -1;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_by_owner PH_OWNERS_ARGS {
  return PH_PICK(by_owner)(ids, cuts, num_batches, bounds, num_parts, own, is_sorted, order, rows, counts);
}
#endif
