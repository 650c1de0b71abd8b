// How the sum of dQ lies in memory: tile of queries after tile of queries; and so do the turns in which tiles of keys add to it.
#pragma once
#include "arguments.h"
#include "features.h"

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

// What sums of dQ that lie row after row are made of. Each tile of keys adds to them. Thousands of additions in FP32 would be off by more
// than FP32's results may be, but not by what shows in 16 bits.
template <i32 kDType> struct DqRowSum {
  using type = double;
};
template <> struct DqRowSum<kF16> {
  using type = float;
};
template <> struct DqRowSum<kBF16> {
  using type = float;
};
STROBE_FN constexpr i64 dq_row_sum_bytes(i32 dtype) { return dtype == kF16 || dtype == kBF16 ? 4 : 8; }

// On Hopper a warpgroup's part of a tile, transposed: blocks of 64 columns of all of a tile's queries; where there is but one, of half of
// them.
STROBE_FN constexpr i32 dq_queries(i32 columns, i32 tile_q) { return columns > 64 ? tile_q : tile_q / 2; }

} // namespace strobe::inline STROBE_ISA
