// What the Hopper backward is compiled for and called with.
#pragma once
#include "../../attention/dq_sum.h"
#include "../../attention/features.h"
#include "../arguments.h"

namespace strobe::sm90 {

struct BackwardConfig {
  i32 dtype;                // kF16 or kBF16
  i32 head_dim, head_dim_v; // rounded up to multiples of 16
  i32 roles;                // 1: both warpgroups share 64 keys; one makes P and dV, the other dS and dK. 0: each owns 64 keys
  i32 tile_q;               // queries of an iteration, a multiple of 16; for head_dim up to 64 a multiple of 32
  i32 registers_load, registers_compute;
  i32 exact_p;       // dS is computed from P in fp32, not from the rounded P that dV takes
  i32 dq_shared;     // dQ is added through shared memory, not from registers
  i32 deterministic; // dQ is added in the same order in every run; through shared memory, except with `roles`
  // 1: a thread block takes one tile of keys after another, and loads the next tile while it stores dK and dV. 0: a block takes one tile of
  // keys.
  i32 persistent;
  // A persistent block takes all key tiles of a (batch, key head) pair, then those of another pair. It alone adds to the pair's dQ, in
  // order, and stores dQ rounded. The sum lies in shared memory if dQ has up to 64 columns, otherwise in global memory that stays in the L2
  // cache.
  i32 owns_dq;
  // A warpgroup keeps K and V of its keys in registers, as the left operands of S and dP. Possible for up to 96 columns, with `roles` up to
  // 192.
  i32 keys_in_registers;
  i32 values_in_registers; // the same for V alone; possible for up to 112 columns
  i32 staged_store;        // dK and dV are stored through the shared memory of V; not with `roles`, nor in persistent blocks
  i32 invariant;           // a row's bits do not depend on what is hidden in its tiles
  i32 bias_by_tma;         // a 16-bit bias, loaded by the copy engine
  // The query heads of a key head are divided into shares, and a thread block takes one share. It stores the share's dK and dV in FP32, and
  // passes/shares.h adds them up.
  i32 split_group;
  i32 packed;     // tiles of keys are numbered through packed sequences (attention/packed_tiles.h)
  i32 key_stages; // stages of K and V: 2 where a persistent block loads the next tile while this one is in use, else 1
  i32 in_line;    // with 2 stages: the next keys' first product begins before these keys' last one ends (in_line.h)
  Features features;

  static constexpr i32 kWarpgroups = 2; // computing warpgroups
  static constexpr i32 kThreads = 128 * (kWarpgroups + 1);
  static constexpr i32 kStages = 2; // stages of Q, of dO, and of dS

  STROBE_FN constexpr i32 tile_k() const { return roles ? 64 : 64 * kWarpgroups; }
  // A tile in shared memory consists of blocks of 64 columns, so widths round up to multiples of 64.
  STROBE_FN constexpr i32 columns() const { return (head_dim + 63) / 64 * 64; }
  STROBE_FN constexpr i32 columns_v() const { return (head_dim_v + 63) / 64 * 64; }
  STROBE_FN constexpr i32 k_bytes() const { return 2 * tile_k() * columns(); }
  STROBE_FN constexpr i32 v_bytes() const { return 2 * tile_k() * columns_v(); }
  STROBE_FN constexpr i32 q_bytes() const { return 2 * tile_q * columns(); }
  STROBE_FN constexpr i32 dout_bytes() const { return 2 * tile_q * columns_v(); }
  STROBE_FN constexpr i32 ds_bytes() const { return 2 * tile_q * tile_k(); }
  STROBE_FN constexpr i32 p_bytes() const { return roles ? 2 * tile_q * tile_k() : 0; }
  STROBE_FN constexpr i32 dq_bytes() const { return dq_shared ? 4 * tile_q * (third() ? head_dim : columns()) : 0; }
  STROBE_FN constexpr i32 bias_bytes() const { return bias_by_tma ? 2 * tile_q * tile_k() : 0; }
  STROBE_FN constexpr i32 row_bytes() const { return 4 * tile_q; } // one number per query: LSE, its correction, or D
  STROBE_FN constexpr i32 lse_bytes() const { return features.unbounded() ? 2 * row_bytes() : row_bytes(); }
  STROBE_FN constexpr i32 message_bytes() const { return 384; } // barriers and messages, for each stage of K and V
  STROBE_FN constexpr i32 shared_bytes() const {
    return key_stages * (k_bytes() + v_bytes()) +
           kStages * (q_bytes() + dout_bytes() + ds_bytes() + bias_bytes() + lse_bytes() + row_bytes()) + p_bytes() + dq_bytes() +
           key_stages * message_bytes() + (features.part ? 96 : 0) + 1024;
  }
  // Whether blocks that own dQ keep its sum in shared memory, after everything above; and the sum's bytes for each tile of queries.
  STROBE_FN constexpr bool dq_sum_in_shared() const { return owns_dq && columns() == 64; }
  STROBE_FN constexpr i32 dq_sum_bytes() const { return 4 * tile_q * head_dim; }
  STROBE_FN constexpr bool v_in_registers() const { return keys_in_registers || values_in_registers; }
  // Whether persistent blocks draw tickets for tiles of keys.
  STROBE_FN constexpr bool draws_keys() const { return persistent && !owns_dq; }
  // Whether dK and dV are stored in FP32.
  STROBE_FN constexpr bool unrounded_sums() const { return split_group || features.unrounded_gradients(); }
  STROBE_FN constexpr i32 dq_queries() const { return strobe::dq_queries(columns(), tile_q); }
  // Whether dQ has a third block of 64 columns. Each warpgroup computes one of the first two, and half of the queries of the third. (With
  // `roles` dQ is divided in another way.)
  STROBE_FN constexpr bool third() const { return !roles && columns() > 128; }
  STROBE_FN constexpr i32 dq_queries_of_third() const { return tile_q / 2; }
  // How many warps of a piece of dQ hold columns that are not padding.
  STROBE_FN constexpr i32 dq_warps(i32 piece) const { return min(4, (head_dim - dq_column(columns(), piece, 0)) / 16); }
};
// Whether a warp's 16 columns of a piece of dQ are padding. (Not a member function: that would read C from memory where its arguments are
// not constants.)
template <BackwardConfig C> STROBE_FN constexpr bool pads_dq(i32 piece, i32 warp) {
  if constexpr (C.head_dim % 64 == 0) return false;
  return is_dq_padding(C.columns(), piece, warp, C.head_dim);
}
// Where a warp's part of the third piece begins in a tile of dQ's sum, in floats.
STROBE_FN constexpr i32 begin_of_third(i32 tile_q, i32 warpgroup, i32 warp) { return 16 * ((8 + warp) * tile_q + warpgroup * tile_q / 2); }

} // namespace strobe::sm90

namespace strobe::inline STROBE_ISA {

struct HopperBackwardArguments : BackwardArguments { // delta is null unless there is a bias or dsinks is wanted
  MappedOperand tma_q, tma_k, tma_v, tma_dout;
  MaskBits mask_bits; // with a mask: its bits, transposed
  i64 mask_step;      // bytes from the bits of 16 queries to those of the next 16; 0: the mask is broadcast over queries
  i32 query_tiles;    // tiles of queries per head (varlen: of all sequences together), numbered as in `rows` and dq_sum
  i32 tiles;          // tiles of keys per (batch, key head) pair
  // The number of (batch, key head) pairs; with BackwardConfig::packed, the number of key heads. They come in bundles of `bundle`, which
  // share the L2 cache. Tiles are numbered as if the last bundle were full.
  i32 pairs;
  Divisor bundle_items, bundle_divisor, heads_kv_divisor;
  Divisor shares;    // split_group: the number of shares per key head
  i32 heads_of_keys; // query heads that a thread block takes for its keys: in.group, or the heads of a share
  // split_group: where blocks store the dK and dV of their shares (SharesArguments).
  Operand dk_shares, dv_shares;
  MappedOperand tma_bias; // with bias_by_tma; a single row if the bias is broadcast over queries
  u32 bias_bytes;         // bytes of a tile of the bias
  float unit;             // Scores::unit, for persistent blocks

  // Where thread blocks store dK and dV.
  STROBE_FN const Operand &dk_of(bool shares) const { return shares ? dk_shares : dk; }
  STROBE_FN const Operand &dv_of(bool shares) const { return shares ? dv_shares : dv; }
};

} // namespace strobe::inline STROBE_ISA
