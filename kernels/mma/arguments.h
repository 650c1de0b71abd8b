// Arguments that only the mma kernels have.
#pragma once
#include "../attention/arguments.h"

namespace strobe::mma {

struct InvariantForwardArguments : ForwardArguments {
  // O, FP32 (rows, head_dim_v), and LSE, (rows), of the chunks of keys that a thread block has merged so far. Null if there is one chunk of
  // keys, or if each chunk is a split.
  float *merged_out, *merged_lse;
};

} // namespace strobe::mma
