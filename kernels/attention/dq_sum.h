// How the sum of dQ lies in memory: tile of queries after tile of queries; and so do the turns in which tiles of keys add to it.
#pragma once
#include "arguments.h"

namespace strobe::inline STROBE_ISA {

// Tiles of `tile` queries, those of a head of a sequence one after another, and as many of all: the order of dq_sum and of the turns.
STROBE_FN i64 first_query_tile(const Inputs &in, i64 b, i64 h, i64 tile) {
  if (!in.cu_seqlens_q) return (b * in.heads + h) * div_up(in.seqlen_q, tile);
  return h * (div_up(in.total_q, tile) + in.batch) + in.held(b).q0 / tile + b; // a sequence's last tile may be a part of one
}
STROBE_FN i64 count_query_tiles(const Inputs &in, i64 tile) {
  if (!in.cu_seqlens_q) return (i64)in.batch * in.heads * div_up(in.seqlen_q, tile);
  return in.heads * (div_up(in.total_q, tile) + in.batch);
}

// FP32's sum of dQ lies row after row, and has so many addends that it would be off by more than all that is added: it is made of several,
// a power of two, to which so many keys each add in turn. To which of them follows from where the keys stand.
STROBE_FN constexpr i32 keys_of_dq_sum() { return 8192; }
STROBE_FN constexpr i32 most_dq_sums() { return 8; }
STROBE_FN i32 dq_sum_of(i32 key, i32 sums) { return (i32)((u32)key / (u32)keys_of_dq_sum() & (u32)(sums - 1)); }

// On Hopper a warpgroup's part of a tile, transposed: blocks of 64 columns of all of a tile's queries; where there is but one, of half of
// them.
STROBE_FN constexpr i32 dq_queries(i32 columns, i32 tile_q) { return columns > 64 ? tile_q : tile_q / 2; }

} // namespace strobe::inline STROBE_ISA
