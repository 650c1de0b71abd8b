// The configuration of the passes that recompute P and dS of a tile of scores, in FP16, BF16, and FP32 by TF32.
#pragma once
#include "../attention/features.h"

namespace strobe {

// Two passes use it: one adds up dbias, the other settles rows.
struct TileConfig {
  i32 dtype;                  // kF16, kBF16 or kF32
  i32 products;               // FP32: how many TF32 products make one product (kernels/tf32)
  i32 head_dim, head_dim_v;   // rounded up to multiples of 16, FP32: of 32
  i32 tile_q, tile_k;         // size of a tile of scores; with block sparsity it lies within a mask block
  i32 key_warps, query_warps; // a tile is divided among key_warps x query_warps warps
  i32 aligned, blocks_per_sm;
  Features features;

  STROBE_FN constexpr i32 threads() const { return 32 * key_warps * query_warps; }
  STROBE_FN constexpr i32 k_bytes() const { return element_bytes(dtype) * tile_k * head_dim; }
  STROBE_FN constexpr i32 v_bytes() const { return element_bytes(dtype) * tile_k * head_dim_v; }
  STROBE_FN constexpr i32 q_bytes() const { return element_bytes(dtype) * tile_q * head_dim; }
  STROBE_FN constexpr i32 dout_bytes() const { return element_bytes(dtype) * tile_q * head_dim_v; }
  STROBE_FN constexpr i32 sums_pitch() const { return tile_q + 1; } // floats
  STROBE_FN constexpr i32 shared_bytes() const {
    return max(k_bytes() + v_bytes() + q_bytes() + dout_bytes(), 4 * max(sums_pitch() * tile_k, 2 * key_warps * tile_q));
  }
};

} // namespace strobe
