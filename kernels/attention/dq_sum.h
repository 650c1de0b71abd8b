// The layout of dQ's sum in memory: one query tile after another. The counters of turns (deterministic mode) have the same order.
#pragma once
#include "arguments.h"
#include "packed_tiles.h"

namespace strobe::inline STROBE_ISA {

// The number of a head's first query tile in dq_sum and in `turns`. The tiles of one head of one sequence are contiguous. tile: queries per
// tile. The next function returns the number of all query tiles.
STROBE_FN i64 first_query_tile(const Inputs &in, i64 b, i64 h, i64 tile) {
  if (!in.cu_seqlens_q) return (b * in.heads + h) * div_up(in.seqlen_q, tile);
  return h * count_packed_tiles(in.total_q, in.batch, tile) + first_packed_tile(in.held(b).q0, b, tile);
}
STROBE_FN i64 count_query_tiles(const Inputs &in, i64 tile) {
  if (!in.cu_seqlens_q) return (i64)in.batch * in.heads * div_up(in.seqlen_q, tile);
  return in.heads * count_packed_tiles(in.total_q, in.batch, tile);
}

// In FP32 the sum of dQ lies row after row. Over many keys the rounding errors of one running sum would exceed the errors of its addends,
// so there are several sums (a power of two of them). Each run of this many keys adds to the next sum, cyclically, so that a key's position
// alone decides which sum it adds to.
STROBE_FN constexpr i32 keys_of_dq_sum() { return 8192; }
STROBE_FN constexpr i32 most_dq_sums() { return 8; }
STROBE_FN i32 dq_sum_of(i32 key, i32 sums) { return (i32)((u32)key / (u32)keys_of_dq_sum() & (u32)(sums - 1)); }

// On Hopper a tile of dQ is stored in pieces of 64 columns, transposed. A piece has all queries of the tile. If there are only 64 columns,
// a piece has half of the queries.
STROBE_FN constexpr i32 dq_queries(i32 columns, i32 tile_q) { return columns > 64 ? tile_q : tile_q / 2; }
// dq_column(): each of a piece's four warps holds 16 columns; this is a warp's first one. is_dq_padding(): whether a warp's columns are
// padding, which is neither added up nor read.
STROBE_FN constexpr i32 dq_column(i32 columns, i32 piece, i32 warp) { return (columns > 64 ? 64 * piece : 0) + 16 * warp; }
STROBE_FN constexpr bool is_dq_padding(i32 columns, i32 piece, i32 warp, i32 head_dim) {
  return dq_column(columns, piece, warp) >= head_dim;
}

} // namespace strobe::inline STROBE_ISA
