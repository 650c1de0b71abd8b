// What the Hopper backward is compiled for and called with.
#pragma once
#include "../../attention/dq_sum.h"
#include "../../attention/features.h"
#include "../arguments.h"

namespace strobe::sm90 {

struct BackwardConfig {
  i32 dtype;                // kF16 or kBF16
  i32 head_dim, head_dim_v; // rounded up to multiples of 16
  i32 roles;                // both warpgroups share 64 keys, one makes P and dV, the other one dS and dK; else each owns 64
  i32 tile_q;               // queries of an iteration, a multiple of 16; of 32 for head_dim up to 64
  i32 registers_load, registers_compute;
  i32 exact_p;       // dS is made of P in fp32, not of P as dV takes it
  i32 dq_shared;     // dQ leaves through shared memory, not from registers
  i32 deterministic; // in the same order on every run; through shared memory, unless by roles
  // A block takes tiles of keys, one after the other, as long as there are any: it fetches the next ones while dK and dV are stored. Else
  // it takes one.
  i32 persistent;
  // It then takes all keys of a (batch, key head) pair, tile after tile, and pair after pair: dQ is its own, added up in order, and leaves
  // it rounded. The sum is in shared memory where there are 64 columns, else in memory that stays in the L2 cache.
  i32 owns_dq;
  // A warpgroup holds K and V of its keys in registers, as the left operands of S and dP; up to 96 columns, by roles up to 192.
  i32 keys_in_registers;
  i32 values_in_registers; // V alone; up to 112 columns
  i32 staged_store;        // dK and dV leave through the shared memory of V; not by roles, nor where a block takes more keys after these
  i32 invariant;           // a row's bits do not depend on what is hidden in its tiles
  i32 bias_by_tma;         // of 16 bits, by the copy engine
  // The query heads of a key head are shared out: a thread block takes some of them, as if they had a key head of their own, and leaves dK
  // and dV of these in FP32, for passes/shares.h to add up.
  i32 split_group;
  i32 packed;     // tiles of keys are those of packed sequences (attention/packed_tiles.h)
  i32 key_stages; // of K and V: 2 where a persistent block fetches the next ones while these are read, else 1
  i32 in_line;    // with these, the first product of the next keys begins before the last one of these ends (in_line.h)
  Features features;

  static constexpr i32 kWarpgroups = 2; // that compute
  static constexpr i32 kThreads = 128 * (kWarpgroups + 1);
  static constexpr i32 kStages = 2; // of Q, of dO, of dS

  STROBE_FN constexpr i32 tile_k() const { return roles ? 64 : 64 * kWarpgroups; }
  // Tiles in shared memory are blocks of 64 columns.
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
  STROBE_FN constexpr i32 row_bytes() const { return 4 * tile_q; } // LSE, or its correction, or D
  STROBE_FN constexpr i32 lse_bytes() const { return features.bias ? 2 * row_bytes() : row_bytes(); }
  STROBE_FN constexpr i32 message_bytes() const { return 384; } // of barriers and what threads tell each other, for a stage of K and V
  STROBE_FN constexpr i32 shared_bytes() const {
    return key_stages * (k_bytes() + v_bytes()) +
           kStages * (q_bytes() + dout_bytes() + ds_bytes() + bias_bytes() + lse_bytes() + row_bytes()) + p_bytes() + dq_bytes() +
           key_stages * message_bytes() + (features.part ? 96 : 0) + 1024;
  }
  // Blocks that own dQ have its sum in shared memory, behind all of this: so many bytes for a tile of queries.
  STROBE_FN constexpr bool dq_sum_in_shared() const { return owns_dq && columns() == 64; }
  STROBE_FN constexpr i32 dq_sum_bytes() const { return 4 * tile_q * head_dim; }
  STROBE_FN constexpr bool v_in_registers() const { return keys_in_registers || values_in_registers; }
  // Persistent blocks draw tickets for tiles of keys, unless a pair's are theirs.
  STROBE_FN constexpr bool draws_keys() const { return persistent && !owns_dq; }
  // dK and dV leave in FP32.
  STROBE_FN constexpr bool unrounded_sums() const { return split_group || features.unrounded_gradients(); }
  STROBE_FN constexpr i32 dq_queries() const { return strobe::dq_queries(columns(), tile_q); }
  // Not by roles: of a third block of 64 columns of dQ each warpgroup makes half of the queries.
  STROBE_FN constexpr bool third() const { return !roles && columns() > 128; }
  STROBE_FN constexpr i32 dq_queries_of_third() const { return tile_q / 2; }
  // The number of a piece's warps whose columns of dQ are not padding.
  STROBE_FN constexpr i32 dq_warps(i32 piece) const { return min(4, (head_dim - dq_column(columns(), piece, 0)) / 16); }
};
// Whether a warp's 16 columns of a piece of dQ are padding. (A member of C would be read from memory where its arguments are no constants.)
template <BackwardConfig C> STROBE_FN constexpr bool pads_dq(i32 piece, i32 warp) {
  if constexpr (C.head_dim % 64 == 0) return false;
  return is_dq_padding(C.columns(), piece, warp, C.head_dim);
}
// Where a warp's columns of the third piece begin, in numbers, in a tile of the sum of dQ.
STROBE_FN constexpr i32 begin_of_third(i32 tile_q, i32 warpgroup, i32 warp) { return 16 * ((8 + warp) * tile_q + warpgroup * tile_q / 2); }

} // namespace strobe::sm90

namespace strobe::inline STROBE_ISA {

struct HopperBackwardArguments : BackwardArguments { // delta: null unless there is a bias or dsinks is wanted
  MappedOperand tma_q, tma_k, tma_v, tma_dout;
  MaskBits mask_bits; // with a mask: its bits, transposed
  i64 mask_step;      // bytes from 16 of its queries to the next 16; 0: it is broadcast over queries
  i32 query_tiles;    // of a head, or varlen of all sequences of a head: in the order of rows and dq_sum
  i32 tiles;          // of keys
  // (batch, key head) pairs, or, where tiles of packed sequences are numbered as PackedTile says, key heads. They come in bundles,
  // `bundle` of them, that share the L2 cache, and are counted as if the last bundle were full.
  i32 pairs;
  Divisor bundle_items, bundle_divisor, heads_kv_divisor;
  Divisor shares;    // of a key head's query heads (split_group)
  i32 heads_of_keys; // query heads that a thread block takes for its keys: in.group, or those of a share
  // split_group: as in SharesArguments, for passes/shares.h to add up. A block's key head is then the number of a share.
  Operand dk_shares, dv_shares;
  MappedOperand tma_bias; // if it comes by the copy engine; of one row where it is broadcast over queries
  u32 bias_bytes;         // of a tile
  float unit;             // Scores::unit, for persistent blocks

  // Where thread blocks leave dK and dV.
  STROBE_FN const Operand &dk_of(bool shares) const { return shares ? dk_shares : dk; }
  STROBE_FN const Operand &dv_of(bool shares) const { return shares ? dv_shares : dv; }
};

} // namespace strobe::inline STROBE_ISA
