// Which build of each kernel runs: chosen once from the processor, or from POLYHOP_ISA (base | avx2 | avx512).
#pragma once

namespace polyhop {

enum Isa { kBase = 0, kAvx2 = 1, kAvx512 = 2 };
Isa isa();

}  // namespace polyhop

#define PH_EXPORT extern "C" __attribute__((visibility("default")))

// Declares `ret name args` in the namespace of every instruction set; an op file defines it in namespace PH_ISA.
// In the base build, PH_PICK(name) is the address of the best version for this processor.
#ifdef PH_X86
#define PH_DECLARE(ret, name, args) \
  namespace polyhop {               \
  namespace base {                  \
  ret name args;                    \
  }                                 \
  namespace avx2 {                  \
  ret name args;                    \
  }                                 \
  namespace avx512 {                \
  ret name args;                    \
  }                                 \
  }
#define PH_PICK(name)                                                          \
  (polyhop::isa() == polyhop::kAvx512 ? &polyhop::avx512::name                 \
   : polyhop::isa() == polyhop::kAvx2 ? &polyhop::avx2::name : &polyhop::base::name)
#else
#define PH_DECLARE(ret, name, args) \
  namespace polyhop {               \
  namespace base {                  \
  ret name args;                    \
  }                                 \
  }
#define PH_PICK(name) (&polyhop::base::name)
#endif
