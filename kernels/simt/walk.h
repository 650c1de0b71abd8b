// One thread walks over tiles for the whole CTA, so that the walk's state lies in shared memory and not in the registers of every thread.
#pragma once
#include "../device/part_tiles.h"

namespace strobe::simt {

struct Tile {
  i32 begin, end;
  bool masked;
  bool open; // the function of the mask has to be asked
};
struct ShiftedTile : Tile {
  i32 shift; // row = position + shift
};
struct NumberedTile : ShiftedTile {
  i32 number; // the tile's number within the sequence
};

// A CTA's work, found from the CTA's number. Tiles of one head are neighbours and share K and V in the L2 cache. If tiles have unequal
// lengths, equally long tiles are neighbours, and the longest come first.
struct Item {
  i32 split, tile, head, batch;

  static __device__ Item of(u32 number, i32 splits, i64 tiles, i32 heads, i32 batches, bool longest_first) {
    Item x;
    x.split = take(number, splits);
    if (!longest_first) x.tile = take(number, (i32)tiles);
    x.head = take(number, heads);
    x.batch = take(number, batches);
    if (longest_first) x.tile = (i32)number;
    return x;
  }

private:
  static __device__ i32 take(u32 &number, i32 count) {
    const u32 x = number % (u32)count;
    number /= (u32)count;
    return (i32)x;
  }
};

// Makes the tiles to walk over: of keys, ascending, or of queries, descending.
struct KeyTiles {
  using Tile = simt::Tile;
  Schedule schedule;
  __device__ __forceinline__ bool next(Tile &tile) {
    KeyTile t;
    if (!schedule.next(t)) return false;
    tile = {(i32)t.begin, (i32)t.end, t.masked, t.open};
    return true;
  }
};
template <bool kBlocks, int kTile> struct DescendingQueries {
  using Tile = simt::Tile;
  QueryTiles<kBlocks, kTile> tiles;
  i32 seqlen_q;
  i64 to_full = 0; // the distance from an entry of the blocks to the number that says whether it is full; 0: not known
  __device__ __forceinline__ bool next(Tile &tile) {
    QueryTile t;
    if (!tiles.next(t)) return false;
    tile = {t.begin, min(t.begin + kTile, seqlen_q), t.masked != 0, !(kBlocks && to_full && t.entry[to_full])};
    return true;
  }
};

// The tiles of keys in a part's ranges.
struct RangesOfKeys {
  using Tile = ShiftedTile;
  PartKeys tiles;
  __device__ __forceinline__ bool next(Tile &tile) {
    PartKeyTile t;
    if (!tiles.next(t)) return false;
    tile = {{(i32)t.begin, (i32)t.end, t.masked, true}, t.shift};
    return true;
  }
};
template <bool kBlocks, int kTile> struct RangesOfQueries {
  using Tile = NumberedTile;
  PartQueries<kBlocks, kTile> tiles;
  __device__ __forceinline__ bool next(Tile &tile) {
    PartQueryTile t;
    if (!tiles.next(t)) return false;
    tile = {{{t.begin, t.end, t.masked != 0, true}, t.shift}, t.number};
    return true;
  }
};

// This object lies in shared memory. The next tile is found while the current one is processed.
template <class Tiles> class Walk {
  using Tile = typename Tiles::Tile;
  struct Slot {
    Tile tile;
    bool valid;
  };
  Tiles tiles_;
  Slot slots_[2];

  __device__ __forceinline__ void find(Slot &slot, i32 nth) {
    slot.valid = true;
    for (i32 n = 0; n < nth && slot.valid; ++n) slot.valid = tiles_.next(slot.tile);
  }

public:
  // Calls body(tile, more) for every `stride`-th tile from number `first` on. more: whether another tile follows. The CTA must meet at a
  // barrier between the starts of two calls of body; `more` is valid only after that barrier.
  template <class F> __device__ __forceinline__ void run(const Tiles &tiles, i32 first, i32 stride, F &&body) {
    __syncthreads(); // the last walk is over
    if (threadIdx.x == 0) {
      tiles_ = tiles;
      find(slots_[0], first + 1);
    }
    __syncthreads();
    for (i32 current = 0; slots_[current].valid; current ^= 1) {
      if (threadIdx.x == 0) find(slots_[current ^ 1], stride);
      const Tile tile = slots_[current].tile;
      body(tile, slots_[current ^ 1].valid);
    }
  }
};

} // namespace strobe::simt
