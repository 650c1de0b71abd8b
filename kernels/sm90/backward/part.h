// Parts of a larger problem (attention/part.h) in the backward: which tiles of queries are loaded for a block's keys. The calling threads
// have few registers: numbers have 32 bits, and values in shared memory or in a table are read again rather than kept.
#pragma once
#include "../part.h"
#include "shared.h"

namespace strobe::sm90 {

// Walks over the tiles of held queries that see some of a block's keys, in each head that shares the keys, from the last tile to the first.
// No tile crosses the border of a range. place: 48 bytes of shared memory for the current tile and the state of the walk.
template <BackwardConfig C> class HeldQueryTiles {
public:
  __device__ __forceinline__ HeldQueryTiles(const HopperBackwardArguments &a, const BackwardShared<C> &shared, u32 place)
      : a_(a), shared_(shared), place_(place) {
    store_shared(place_ + kHead, load_shared(shared_.keys() + 4) * a_.heads_of_keys);
    store_shared(place_ + kRange, last_range());
    store_shared(place_ + kTile, 0), store_shared(place_ + kFirst, 0);
  }

  // Goes to the next tile. Returns whether there is one.
  __device__ __forceinline__ bool next() {
    while (load(kTile) <= load(kFirst)) {
      if (!next_range()) return false;
    }
    const i32 tile = load(kTile) - 1, n = load(kRange), b = batch();
    store_shared(place_ + kTile, tile);
    const HeldRange r = held_range_of_queries(a_.in, b, n);
    const i32 begin = r.start + tile * C.tile_q, first_row = first_held_row(a_.in.cu_seqlens_q, a_.in.total_q, b);
    store_shared(place_ + kRow, first_row + begin + r.shift());
    // The tile's number in dq_sum, counted as in first_part_tile (attention/part.h).
    i32 first = b * a_.in.heads * a_.query_tiles;
    if (a_.in.cu_seqlens_q) first = (i32)((u32)first_row / (u32)C.tile_q) + b * a_.in.part->count_q;
    write(place_, begin, load(kHead), first + load(kHead) * a_.query_tiles + number_of_first(r, n, C.tile_q, false) + tile,
          min(C.tile_q, r.end() - begin) * kRows);
    return true;
  }
  // The tile that next() found, without the flags that depend on keys; and the tile's first row in the tensors.
  __device__ __forceinline__ QueryStep step() const { return read<QueryStep>(place_); }
  __device__ __forceinline__ i32 row() const { return load(kRow); }

private:
  // Offsets of the walk's state. Of the current range of queries, the tiles [first, tile) are still to be visited.
  static constexpr u32 kRow = 16, kHead = 32, kRange = 36, kTile = 40, kFirst = 44;
  __device__ __forceinline__ i32 load(u32 what) const { return (i32)load_shared(place_ + what); }
  __device__ __forceinline__ i32 batch() const { return (i32)load_shared(shared_.keys()); }
  // The positions of the queries that see some of the keys.
  __device__ __forceinline__ BasicRange<i32> queries() const {
    const KeyBlock keys = read<KeyBlock>(shared_.keys());
    const Reach reach = read<Reach>(shared_.reach());
    return {max(keys.begin - reach.high, 0), min(keys.seqlen_k - reach.low, reach.seqlen_q)};
  }
  // One more than the number of the last range that begins before the end of queries().
  __device__ __forceinline__ i32 last_range() const {
    const i32 end = queries().end, b = batch();
    return first_where(a_.in.part->count_q, [&](i32 n) { return range_of_queries(a_.in, b, n).start >= end; });
  }
  __device__ __forceinline__ bool next_range() {
    i32 n = load(kRange) - 1;
    while (n < 0 || held_range_of_queries(a_.in, batch(), n).end() <= queries().begin) {
      const i32 head = load(kHead) + 1;
      if (head == ((i32)load_shared(shared_.keys() + 4) + 1) * a_.heads_of_keys) return false;
      store_shared(place_ + kHead, head);
      n = last_range() - 1;
    }
    store_shared(place_ + kRange, n);
    const HeldRange r = held_range_of_queries(a_.in, batch(), n);
    const BasicRange<i32> any = queries();
    store_shared(place_ + kFirst, (u32)max(any.begin - r.start, 0) / (u32)C.tile_q);
    store_shared(place_ + kTile, (u32)(min(any.end, r.end()) - r.start + C.tile_q - 1) / (u32)C.tile_q);
    return true;
  }

  const HopperBackwardArguments &a_;
  const BackwardShared<C> &shared_;
  const u32 place_;
};

// How many key tiles before the block's own tile add to dQ of these queries. Like part_tiles_before (device/turns.h), with fewer registers.
template <BackwardConfig C>
__device__ __forceinline__ u32 held_tiles_before(const Inputs &in, const BackwardShared<C> &shared, const QueryStep &step) {
  const i32 b = (i32)load_shared(shared.keys()), own = (i32)load_shared(shared.held() + 4), count = in.part->count_k;
  const i32 begin = max(step.begin + (i32)load_shared(shared.reach()), 0);
  const i32 end = step.begin + (i32)((u32)step.flags / kRows) + (i32)load_shared(shared.reach() + 4);
  i32 n = first_where(count, [&](i32 n) { return range_of_keys(in, b, n).end() > begin; });
  u32 before = 0;
#pragma unroll 1
  for (; n < count; ++n) {
    const HeldRange r = held_range_of_keys(in, b, n);
    const i32 earlier =
        own - number_of_first(r, n, C.tile_k(), false); // how many tiles lie between the range's first tile and the block's own tile
    if (earlier <= 0 || r.start >= end) break;
    const i32 first = (i32)((u32)max(begin - r.start, 0) / (u32)C.tile_k());
    before += (u32)max(min((i32)((u32)(min(r.end(), end) - r.start + C.tile_k() - 1) / (u32)C.tile_k()), earlier) - first, 0);
  }
  return before;
}

} // namespace strobe::sm90
