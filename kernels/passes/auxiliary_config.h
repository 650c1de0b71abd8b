// The configuration of the passes that make max_logit and column_sums.
#pragma once
#include "../attention/features.h"

namespace strobe::passes {

struct AuxiliaryConfig {
  i32 dtype;
  i32 tensor_cores;   // S by mma.sync, for FP16 and BF16; else by FMA, for any dtype
  i32 column_sums;    // column_sums is asked for; else LSE is not read
  i32 head_dim;       // with tensor cores: rounded up to a multiple of 16; else 0
  i32 tile_q, tile_k; // a tile of scores; with block sparsity it lies within a mask block
  i32 aligned;        // with tensor cores: 16-byte copies
  i32 blocks_per_sm;
  Features features; // without dropout, which has no effect here

  // By FMA: the threads across keys and across queries, and how many columns of Q and K are staged at a time.
  static constexpr i32 kThreadsK = 16, kThreadsQ = 8, kColumns = kRunOfColumns;
  STROBE_FN constexpr i32 threads() const { return tensor_cores ? 2 * tile_k : kThreadsK * kThreadsQ; } // a warp has 16 keys
  STROBE_FN constexpr i32 pitch(i32 tile) const { return tile + 1; }
  // How many threads share the elements of one key.
  STROBE_FN constexpr i32 shares() const { return tensor_cores ? 4 : kThreadsQ; }
  STROBE_FN constexpr i32 k_bytes() const { return element_bytes(dtype) * tile_k * head_dim; }
  STROBE_FN constexpr i32 real_bytes() const { return dtype == kF64 ? 8 : 4; }
  STROBE_FN constexpr i32 shared_bytes() const {
    const i32 scores =
        tensor_cores ? k_bytes() + element_bytes(dtype) * tile_q * head_dim : real_bytes() * kColumns * (pitch(tile_q) + pitch(tile_k));
    return max(scores, real_bytes() * (shares() * tile_k + threads()));
  }
};

struct LargestConfig {
  i32 dtype;
  STROBE_FN static constexpr i32 threads() { return 128; }
};

} // namespace strobe::passes
