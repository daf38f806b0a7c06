// The four Philox words of many ids.
#include <algorithm>

#include "isa.h"
#include "philox_many.h"
#include "pool.h"

#define PH_ARGS (int64_t key, const int64_t* ids, int64_t n, int64_t other, int64_t* out, int64_t threads)

PH_DECLARE(int64_t, random_u32, PH_ARGS)

namespace polyhop {
namespace PH_ISA {

int64_t random_u32 PH_ARGS {
  constexpr int64_t kBatch = 64;
  parallel_for(n, 1 << 14, int(threads), [&](int64_t begin, int64_t end) {
    uint64_t id[kBatch], others[kBatch];
    uint32_t words[4 * kBatch];
    std::fill(others, others + kBatch, uint64_t(other));
    for (int64_t k = begin; k < end; k += kBatch) {
      const int64_t count = std::min(kBatch, end - k);
      for (int64_t i = 0; i < count; ++i) id[i] = uint64_t(ids[k + i]);
      philox_many(uint64_t(key), id, others, int(count), words);
      for (int64_t i = 0; i < 4 * count; ++i) out[4 * k + i] = int64_t(words[i]);
    }
  });
  return 0;
}

}  // namespace PH_ISA
}  // namespace polyhop

#ifdef PH_ISA_base
PH_EXPORT int64_t ph_random_u32 PH_ARGS { return PH_PICK(random_u32)(key, ids, n, other, out, threads); }
#endif
