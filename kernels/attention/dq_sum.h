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
// to which the tiles of keys add in turn, as long as these sums are not large.
STROBE_FN i32 dq_sums(const Inputs &in, i32 head_dim) {
  constexpr i64 kKeys = 8192, kMost = 8, kNumbers = i64(1) << 26;
  const i64 room = kNumbers / max(in.rows() * head_dim, i64(1));
  return (i32)max(min(min(div_up(in.seqlen_k, kKeys), room), kMost), i64(1));
}

// On Hopper a warpgroup's part of a tile, transposed: blocks of 64 columns of all of a tile's queries; where there is but one, of half of
// them.
STROBE_FN constexpr i32 dq_queries(i32 columns, i32 tile_q) { return columns > 64 ? tile_q : tile_q / 2; }

} // namespace strobe::inline STROBE_ISA
