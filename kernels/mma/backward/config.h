// What a backward kernel of the mma family is compiled for, and how much memory it needs.
#pragma once
#include "../../attention/arguments.h"
#include "../../attention/features.h"

namespace strobe::mma {

struct BackwardConfig {
  i32 dtype;                // kF16 or kBF16
  i32 head_dim, head_dim_v; // rounded up to a multiple of 16 * dim_warps, or, for wide heads, of 64
  i32 tile_q, tile_k;       // queries: a multiple of step_q * dim_warps, or step_q; keys: a multiple of 16 * key_warps
  i32 key_warps,
      dim_warps; // each role has key_warps x dim_warps warps: key_warps divide the keys, dim_warps the head dims (and the queries of S)
  i32 step_q;    // the number of queries for which a warp computes S at a time; a multiple of 16
  i32 aligned;   // 16-byte copies: adjacent columns, rows and bases multiples of 16 bytes, head dims multiples of 8
  i32 deterministic;
  i32 invariant; // deterministic, and a row's bits do not depend on what is hidden in its tiles
  i32 blocks_per_sm;
  Features features;

  STROBE_FN constexpr i32 warps() const { return 2 * key_warps * dim_warps; }
  STROBE_FN constexpr i32 threads() const { return 32 * warps(); }
  // Whether a tile has too few queries to divide among dim_warps. All of these warps then compute the same S.
  STROBE_FN constexpr bool repeats() const { return tile_q < step_q * dim_warps; }

  // Bytes of shared memory.
  STROBE_FN constexpr i32 k_bytes() const { return 2 * tile_k * head_dim; }
  STROBE_FN constexpr i32 v_bytes() const { return 2 * tile_k * head_dim_v; }
  STROBE_FN constexpr i32 q_bytes() const { return 2 * tile_q * head_dim; }
  STROBE_FN constexpr i32 dout_bytes() const { return 2 * tile_q * head_dim_v; }
  STROBE_FN constexpr i32 p_bytes() const { return 2 * tile_q * tile_k; }
  // How many arrays of P's size the left role hands over. With a function of q.k there is a second array, for the derivative (kSlope in
  // steps.h).
  STROBE_FN constexpr i32 p_planes() const { return features.curved() ? 2 : 1; }
  // How many numbers per query are staged: LSE, D twice, and LSE's correction if scores are unbounded.
  STROBE_FN constexpr i32 stats() const { return features.unbounded() ? 4 : 3; }
  STROBE_FN constexpr i32 stats_bytes() const { return 2 * stats() * tile_q * 4; }
  STROBE_FN constexpr i32 state_bytes() const { return features.part ? 768 : 512; }
  STROBE_FN constexpr i32 shared_bytes() const {
    return k_bytes() + v_bytes() + 2 * (q_bytes() + dout_bytes()) + (p_planes() + 2) * p_bytes() + stats_bytes() + state_bytes();
  }

  // dQ of an iteration (tile_q x head_dim) is divided among dq_rows x dq_columns warps: as many warps as possible, in a shape as square as
  // possible.
  STROBE_FN constexpr i32 dq_rows() const { return dq_split(true); }
  STROBE_FN constexpr i32 dq_columns() const { return dq_split(false); }

  // How many counters BackwardArguments::turns has: one for each query tile and each warp.
  STROBE_FN constexpr i64 turns(i64 query_tiles) const { return query_tiles * warps(); }

private:
  STROBE_FN constexpr i32 dq_split(bool rows) const {
    i32 best_rows = 1, best_columns = 1;
    i64 best = -1;
    for (i32 r = 1; r <= warps(); ++r) {
      for (i32 c = 1; r * c <= warps(); ++c) {
        if (tile_q % (16 * r) || head_dim % (16 * c)) continue;
        i64 merit = (i64)r * c * 65536 - (tile_q / r + head_dim / c);
        if (merit >= best) best = merit, best_rows = r, best_columns = c;
      }
    }
    return rows ? best_rows : best_columns;
  }
};

} // namespace strobe::mma
