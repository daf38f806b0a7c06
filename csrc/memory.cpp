// Large results of a training step are freed and asked for again at every step. By default the C library gives each one
// back to the system and pays for new, zeroed pages: a third of a mini-batch step's time. While kept, they are reused.
#include <malloc.h>

#include <cstdint>

#include "isa.h"

// keep = 1: serve large blocks from the heap and do not shrink it; keep = 0: back to the defaults, and shrink now.
// Returns 1 where the C library can do it.
PH_EXPORT int64_t ph_keep_memory(int64_t keep) {
#if defined(__GLIBC__)
  constexpr int kDefaultMaps = 65536, kDefaultTrim = 128 << 10, kDefaultPad = 128 << 10;
  mallopt(M_MMAP_MAX, keep ? 0 : kDefaultMaps);
  mallopt(M_TRIM_THRESHOLD, keep ? INT32_MAX : kDefaultTrim);
  mallopt(M_TOP_PAD, keep ? 64 << 20 : kDefaultPad);
  if (!keep) malloc_trim(0);
  return 1;
#else
  (void)keep;
  return 0;
#endif
}
