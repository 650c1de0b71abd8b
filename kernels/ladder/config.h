// What a kernel of the ladder is compiled for. The host computes the cost of a tile from this file; the kernels are in the other headers of
// this folder.
#pragma once
#include "../attention/features.h"

namespace strobe::ladder {

struct Config {
  i32 tile_q, tile_k; // Br and Bc of the papers, multiples of 16
  i32 head_dim;       // d, rounded up to a multiple of 16 (tensor cores beyond 128: of 32); the added columns are zeros
  i32 dtype;          // dtype of q, k, v, a strobe_dtype
  i32 aligned;        // tensor cores: rows may be copied 16 bytes at a time

  // Bytes of shared memory ("SRAM" in the papers). Rows are padded: by one float in FP32 (tile.h), by eight numbers in 16 bits
  // (fragment.h).
  STROBE_FN constexpr i32 shared(i32 rows, i32 columns) const {
    return dtype == kF32 ? rows * (columns + 1) * 4 : rows * (columns + 8) * 2;
  }
  STROBE_FN constexpr i32 shared_scores() const { return shared(tile_q, head_dim) + shared(tile_k, head_dim); }  // naive: S = Q K^T
  STROBE_FN constexpr i32 shared_product() const { return shared(tile_q, tile_k) + shared(tile_k, head_dim); }   // naive: P V
  STROBE_FN constexpr i32 shared_product_t() const { return shared(tile_q, tile_k) + shared(tile_q, head_dim); } // naive: P^T dO
  STROBE_FN constexpr i32 shared_forward() const {                                                               // Q, K, V, P
    return shared(tile_q, head_dim) + 2 * shared(tile_k, head_dim) + (dtype == kF32 ? shared(tile_q, tile_k) : 0);
  }
  STROBE_FN constexpr i32 shared_backward() const { // Q, dO, K, V, P or dS; tensor cores: L and D
    return 2 * (shared(tile_q, head_dim) + shared(tile_k, head_dim)) +
           (dtype == kF32 ? shared(tile_q, tile_k) : shared(tile_k, tile_q) + 8 * tile_q);
  }

  // Tensor cores: a warp owns 16 queries of the tile, in the backward 16 keys. At d > 128 two warps share these keys, and each holds half
  // of the columns of dK and dV.
  STROBE_FN constexpr i32 parts() const { return head_dim > 128 ? 2 : 1; }
  STROBE_FN constexpr i32 threads_forward() const { return dtype == kF32 ? 256 : tile_q / 16 * 32; }
  STROBE_FN constexpr i32 threads_backward() const { return dtype == kF32 ? 256 : tile_k / 16 * parts() * 32; }

  // The largest number of sums that a thread holds at once.
  STROBE_FN constexpr i32 sums_naive() const { return max(tile_q, tile_k) * max(tile_k, head_dim) / 256; }
  STROBE_FN constexpr i32 sums_forward() const { return tile_q * (tile_k + head_dim) / threads_forward(); } // S, O
  STROBE_FN constexpr i32 sums_backward() const {                                                           // dK, dV; P and dS, or dQ
    if (dtype != kF32) return head_dim / parts() + 24;
    return (2 * tile_k * head_dim + tile_q * max(2 * tile_k, head_dim)) / 256;
  }
  // How many CTAs fit an SM's 65,536 registers, if a thread needs 96 beside its sums.
  static STROBE_FN constexpr i32 blocks_per_sm(i32 threads, i32 sums) { return max(1, 65536 / (threads * (sums + 96))); }
};

} // namespace strobe::ladder
