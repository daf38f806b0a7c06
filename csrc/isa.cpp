#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace polyhop {
namespace {

Isa detect() {
#ifdef PH_X86
  Isa best = kBase;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = kAvx2;
  if (best == kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    best = kAvx512;
  const char* wish = std::getenv("POLYHOP_ISA");
  if (wish && !std::strcmp(wish, "base")) return kBase;
  if (wish && !std::strcmp(wish, "avx2") && best >= kAvx2) return kAvx2;
  return best;
#else
  return kBase;
#endif
}

}  // namespace

Isa isa() {
  static const Isa chosen = detect();
  return chosen;
}

}  // namespace polyhop

PH_EXPORT const char* ph_isa() {
  static const char* const names[] = {"base", "avx2", "avx512"};
  return names[polyhop::isa()];
}

// Raised with every change of a signature: a library that does not match is refused, not called.
PH_EXPORT int ph_abi() { return 1; }
