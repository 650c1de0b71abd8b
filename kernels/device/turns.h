// Deterministic sums: key tiles add to dQ of a query tile in turns, in ascending order, so that the result has the same bits in every run.
#pragma once
#include "../attention/part.h"
#include "../ptx/barrier.h"

namespace strobe {

// How many key tiles (of kTileK keys) before the one at k0 add to dQ of the query tile at q0.
template <bool kBlocks, int kTileK, class Int>
__device__ __forceinline__ u32 key_tiles_before(const Inputs &in, const BasicBand<Int> &band, i32 b, i32 h, i32 q0, i32 k0) {
  const u32 first = (u32)max(Int(0), band.low + q0) / kTileK, own = (u32)k0 / kTileK;
  if constexpr (kBlocks) {
    const u32 each = (u32)in.blocks.column_tokens / kTileK; // key tiles per mask block
    const BlockRow row = in.blocks.row(b, h, (u32)q0 / (u32)in.blocks.row_tokens);
    const i64 entry = row.first_from(first / each), kept = row.first_from(own / each) - entry;
    const bool cut = entry < row.count && row.cols[entry] == (i32)(first / each);
    return (u32)kept * each + own % each - (cut ? first % each : 0);
  }
  return own - first;
}

// In a part: how many key tiles with a smaller number than `own` have a key that some of the queries [q0, q1) see.
template <bool kBlocks, int kTileK>
__device__ __forceinline__ u32 part_tiles_before(const Inputs &in, const Band &band, i32 b, i32 h, i32 q0, i32 q1, i32 own) {
  const HeldRanges keys = held_keys(in, b);
  Band whole = band;
  whole.seqlen_k = 1ll << 31;
  const Range any = whole.keys_any(q0, q1);
  u32 before = 0;
  for (i32 n = keys.first_behind(any.begin); n < keys.count; ++n) {
    const HeldRange r = keys.at(n);
    const i32 number = number_of_first(r, n, kTileK, kBlocks), at = first_of_tiles(r, kTileK, kBlocks);
    if (number >= own || r.start >= any.end) break;
    // Counts those of the range's tiles, from `first` to `end`, that the queries see and that come before `own`.
    const i32 most = (i32)div_up(min((i64)r.end(), any.end) - at, kTileK), first = (i32)(max((i64)r.start, any.begin) - at) / kTileK,
              end = min(most, own - number);
    if constexpr (kBlocks) {
      const BlockRow row = in.blocks.row(b, h, (u32)q0 / (u32)in.blocks.row_tokens);
      for (i32 tile = first; tile < end; ++tile) before += row.keeps(at + tile * kTileK);
    } else {
      before += (u32)max(end - first, 0);
    }
  }
  return before;
}

// Waits until `before` key tiles have added. seen: an earlier reading of the counter. The wait ends whatever the caller's tensors hold. If
// sequences overlap (invalid cu_seqlens), tiles of other sequences count too, which only shortens the wait. If lists of mask blocks
// contradict one another, the wait is given up.
template <bool kBlocks> __device__ __forceinline__ void await_turn(const u32 *turn, u32 seen, u32 before) {
  for (i64 tries = 0; seen < before && (!kBlocks || tries < 1 << 24); ++tries) seen = load_acquire(turn);
}
// Ends a turn: one more tile has added. All additions that this thread has observed become visible before.
__device__ __forceinline__ void end_turn(u32 *turn) { add_release(turn, 1); }

} // namespace strobe
