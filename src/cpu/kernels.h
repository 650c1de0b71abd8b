// The body of an instruction set's translation unit, but for its table.
#pragma once
#include "backward_bias.h"
#include "fma.h"
#include "isa.h"

namespace strobe::inline STROBE_ISA {

template <class Math> constexpr CpuKernels kernels_of(const char *arithmetic) {
  return {arithmetic, forward_workspace<Math>, forward<Math>, backward_workspace<Math>, backward<Math>};
}

} // namespace strobe::inline STROBE_ISA
