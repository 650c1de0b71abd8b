// How a kernel of this family is cut: any GPU from compute capability 6.1, plain FMA in FP32 (FP16 and BF16 are loaded as FP32) or FP64.
// Host and device share this file.
#pragma once
#include "../attention/features.h"

namespace strobe::simt {

struct Config {
  i32 dtype;                // of q, k, v
  i32 head_dim, head_dim_v; // rounded up to kDimStep
  i32 tile_q, tile_k;       // of S
  i32 threads_q, threads_k; // a thread owns tile_q / threads_q rows by tile_k / threads_k columns of S; threads_k: lanes of one warp
  i32 chunk;                // how much of the sum over the head dimension is staged in shared memory at a time
  i32 blocks_per_sm;        // resident CTAs that registers are limited for
  i32 aligned;              // rows of q, k, v and dout are copied in 16 (16-bit types: 8) byte pieces
  Features features;

  static constexpr i32 kDimStep = 32;
  static constexpr i32 kWalkBytes = 256;                  // of shared memory, for the schedule
  static constexpr i32 kDeltaRows = 64, kCombineRows = 4; // rows that a CTA of Delta and QueryGradient, of Combine takes

  STROBE_FN constexpr i32 threads() const { return threads_q * threads_k; }
  STROBE_FN constexpr i32 real_bytes() const { return dtype == kF64 ? 8 : 4; }
  STROBE_FN constexpr i32 pad() const { return 16 / real_bytes(); }
  // Distances of rows in shared memory, in elements: no two of a quarter warp's 16-byte reads in one bank.
  STROBE_FN constexpr i32 chunk_stride() const { return chunk + pad(); }
  STROBE_FN constexpr i32 p_stride() const { return tile_k + threads_k; }
  STROBE_FN constexpr i32 p_elements() const { return tile_q * p_stride(); }

  // One of the two stages that operands pass through: a chunk of two tiles along the head dimension, or some rows of one.
  STROBE_FN constexpr i32 stage_elements() const { return max((tile_q + tile_k) * chunk_stride(), pad() * max(head_dim, head_dim_v)); }
  // Rows of a tile of `rows` that are staged at a time when whole rows of `dim` elements are.
  STROBE_FN constexpr i32 rows_staged(i32 rows, i32 dim) const {
    i32 n = rows < 16 ? rows : 16;
    while (n > pad() && n * dim > stage_elements()) n /= 2;
    return n;
  }
  STROBE_FN constexpr i32 forward_shared_bytes() const { return kWalkBytes + (2 * stage_elements() + p_elements()) * real_bytes(); }
  // P, dS; LSE and D of the queries. Also of the gradient of the bias.
  STROBE_FN constexpr i32 backward_shared_bytes() const {
    return kWalkBytes + (2 * stage_elements() + 2 * p_elements() + 2 * tile_q) * real_bytes();
  }
};

} // namespace strobe::simt
