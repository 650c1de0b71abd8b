// The body of an instruction set's translation unit, but for its table.
#pragma once
#include "auxiliary.h"
#include "backward_bias.h"
#include "decode.h"
#include "fma.h"
#include "isa.h"

namespace strobe::inline STROBE_ISA {

template <class Math> constexpr CpuKernels kernels_of(const char *arithmetic, TileSizes forward_tile, TileSizes backward_tile) {
  return {arithmetic,     forward_tile,
          backward_tile,  forward_workspace<Math>,
          forward<Math>,  decode_workspace<Math>,
          decode<Math>,   backward_workspace<Math>,
          backward<Math>, auxiliary_workspace<Math>,
          auxiliary<Math>};
}

} // namespace strobe::inline STROBE_ISA
