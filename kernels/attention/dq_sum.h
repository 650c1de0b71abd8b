// How the sum of dQ lies in memory: tile of queries after tile of queries; and so do the turns in which tiles of keys add to it.
#pragma once
#include "arguments.h"
#include "packed_tiles.h"

namespace strobe::inline STROBE_ISA {

// The number of a head's first tile of `tile` queries in dq_sum and in the turns, where the tiles of a head of a sequence are contiguous;
// below, the number of all tiles.
STROBE_FN i64 first_query_tile(const Inputs &in, i64 b, i64 h, i64 tile) {
  if (!in.cu_seqlens_q) return (b * in.heads + h) * div_up(in.seqlen_q, tile);
  return h * count_packed_tiles(in.total_q, in.batch, tile) + first_packed_tile(in.held(b).q0, b, tile);
}
STROBE_FN i64 count_query_tiles(const Inputs &in, i64 tile) {
  if (!in.cu_seqlens_q) return (i64)in.batch * in.heads * div_up(in.seqlen_q, tile);
  return in.heads * count_packed_tiles(in.total_q, in.batch, tile);
}

// In FP32 the sum of dQ lies row after row, and has so many addends that a single sum would round more than all the addends are off. So
// there are several sums, a power of two: each run of this many keys adds to the next one in turn, so that the position of a key alone says
// to which.
STROBE_FN constexpr i32 keys_of_dq_sum() { return 8192; }
STROBE_FN constexpr i32 most_dq_sums() { return 8; }
STROBE_FN i32 dq_sum_of(i32 key, i32 sums) { return (i32)((u32)key / (u32)keys_of_dq_sum() & (u32)(sums - 1)); }

// On Hopper a part of a tile of dQ is 64 columns, transposed: of all queries of the tile, or of half of them where there are only 64
// columns.
STROBE_FN constexpr i32 dq_queries(i32 columns, i32 tile_q) { return columns > 64 ? tile_q : tile_q / 2; }
// Each of a part's four warps holds 16 columns, from this one on. From head_dim on they are padding, which nobody adds up or reads.
STROBE_FN constexpr i32 dq_column(i32 columns, i32 part, i32 warp) { return (columns > 64 ? 64 * part : 0) + 16 * warp; }
// Of number `at` of a tile.
STROBE_FN constexpr bool is_dq_padding(i32 at, i32 columns, i32 tile_q, i32 head_dim) {
  const u32 warp = (u32)at / (u32)(16 * dq_queries(columns, tile_q));
  return dq_column(columns, (i32)(warp / 4), (i32)(warp % 4)) >= head_dim;
}

} // namespace strobe::inline STROBE_ISA
