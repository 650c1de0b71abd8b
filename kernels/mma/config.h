// What a kernel of the mma family is compiled for: FP16 and BF16 on tensor cores by mma.sync, sm_80 and later (FP16: sm_75).
#pragma once
#include "../attention/features.h"

namespace strobe::mma {

struct Config {
  i32 dtype;                // kF16 or kBF16
  i32 head_dim, head_dim_v; // rounded up to multiples of 16
  i32 tile_q, tile_k;       // multiples of 16
  i32 warps;
  i32 stages;    // tiles of K, and of V, in shared memory at a time
  i32 aligned;   // 16-byte copies: columns are adjacent, row strides and base addresses are multiples of 16 bytes, head dims of 8
  i32 exact_max; // 1: the running maximum is followed exactly; 0: the reference may lag by a factor of 2^8
  i32 invariant; // forward: a row's bits do not depend on its tile of queries; keys are taken in chunks (device/chunks.h)
  i32 blocks_per_sm;
  i32 uneven;       // decode: sequences have uneven lengths (device/uneven_shares.h)
  i32 column_warps; // how many warps share rows and divide the columns of O: more than 1 where O is too wide for one warp's registers
  Features features;

  STROBE_FN constexpr i32 threads() const { return 32 * warps; }
  STROBE_FN static constexpr i32 chunk() { return 2048; }                 // keys of a chunk of an invariant forward, a multiple of tile_k
  STROBE_FN constexpr i32 groups() const { return warps / column_warps; } // groups of warps that share rows (in decode: keys)
  // Bytes through which the warps of a group exchange their sums S.
  STROBE_FN constexpr i32 exchange_bytes(i32 rows) const { return column_warps > 1 ? 4 * column_warps * rows * tile_k : 0; }
  // The forward's shared memory: Q (at the end O), the stages of K, the stages of V, the exchange of S.
  STROBE_FN constexpr i32 q_bytes() const { return 2 * tile_q * max(head_dim, head_dim_v); }
  STROBE_FN constexpr i32 forward_exchange_at() const { return q_bytes() + 2 * stages * tile_k * (head_dim + head_dim_v); }
  STROBE_FN constexpr i32 forward_walk_at() const { return forward_exchange_at() + exchange_bytes(tile_q); } // a part's walk over keys
  STROBE_FN constexpr i32 forward_shared_bytes() const { return forward_walk_at() + (features.part ? 640 : 0); }
  // Bytes of a row of K or V in shared memory.
  STROBE_FN constexpr i32 row_bytes(i32 dim) const { return features.quant == kInt4 ? dim / 2 : features.quant ? dim : 2 * dim; }
  // Decode's shared memory: Q, every group's stages of K, every group's stages of V, the exchange of S. At the end these are replaced by M,
  // l and O of every group.
  STROBE_FN constexpr i32 decode_exchange_at() const {
    return 2 * tile_q * head_dim + groups() * stages * tile_k * (row_bytes(head_dim) + row_bytes(head_dim_v));
  }
  STROBE_FN constexpr i32 decode_shared_bytes() const {
    return max(decode_exchange_at() + groups() * exchange_bytes(tile_q), 4 * groups() * tile_q * (2 + head_dim_v + 8));
  }
};

} // namespace strobe::mma
