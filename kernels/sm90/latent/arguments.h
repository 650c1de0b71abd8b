// The arguments of the kernel of latent attention.
#pragma once
#include "../../attention/arguments.h"
#include "../../attention/divisor.h"
#include "../../ptx/tensor_map.h"

namespace strobe::inline STROBE_ISA {

struct LatentArguments : ForwardArguments {
  MappedOperand tma_q, tma_k;
  // The rows of a tile: `queries` queries of each of `packed` query heads. The query heads of a key head are divided into `pieces`, and the
  // queries of the longest sequence into `tiles`.
  i32 packed, pieces, tiles;
  Divisor queries;
  // With `invariant`, if a block walks over several chunks of keys: O, FP32 (rows, head_dim_v), and LSE, (rows), of those merged so far.
  float *merged_out, *merged_lse;
};

} // namespace strobe::inline STROBE_ISA
