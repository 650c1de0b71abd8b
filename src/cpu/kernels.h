// The body of an instruction set's translation unit, but for its table.
#pragma once
#include "backward_bias.h"
#include "fma.h"
#include "isa.h"

namespace strobe::inline STROBE_ISA {

template <class Math> constexpr CpuKernels kernels_of(const char *arithmetic) {
  return {arithmetic,
          [](const Problem &p, const TileSizes &tile, int64_t threads) { return threads * forward_scratch<Math>(p, tile); }, forward<Math>,
          backward_workspace<Math>, backward<Math>};
}

} // namespace strobe::inline STROBE_ISA
