// The schedules for a part of a larger problem: tiles of keys, ascending, and tiles of queries, descending. No tile crosses the border of a
// range of held rows.
#pragma once
#include "../attention/part.h"
#include "query_tiles.h"

namespace strobe {

struct PartKeyTile : KeyTile {
  i32 shift; // row of K and V = position + shift
};

// The tiles of keys that some of the queries [q0, q1) see. align: 16; or 1 if ranges may begin anywhere.
class PartKeys {
public:
  __device__ __forceinline__ PartKeys(const Band &band, i64 q0, i64 q1, i64 tile, i64 align, const BlockRow &row, const HeldRanges &ranges)
      : ranges_(ranges), band_(band), any_(band.keys_any(q0, q1)), row_(row), q0_(q0), q1_(q1), tile_(tile), align_(align),
        n_(any_.empty() ? ranges.count : ranges.first_behind(any_.begin)), schedule_(of_range()) {}

  __device__ __forceinline__ bool next(PartKeyTile &tile) {
    while (!schedule_.next(tile)) {
      if (n_ >= ranges_.count || ++n_ >= ranges_.count || ranges_.ranges[n_].start >= any_.end) return n_ = ranges_.count, false;
      schedule_ = of_range();
    }
    tile.shift = ranges_.ranges[n_].shift();
    return true;
  }

private:
  __device__ __forceinline__ Schedule of_range() const {
    const HeldRange r = n_ < ranges_.count ? ranges_.at(n_) : HeldRange{0, 0, 0};
    Band band = band_;
    band.seqlen_k = r.end();
    BlockRow row = row_;
    if (row.cols) { // skip the entries before the range
      const i64 skipped = row.first_from(r.start / row.block);
      row.cols += skipped, row.count -= skipped;
    }
    return Schedule(intersect(any_, {r.start, r.end()}), band, q0_, q1_, tile_, align_, row);
  }

  HeldRanges ranges_;
  Band band_;
  Range any_;
  BlockRow row_;
  i64 q0_, q1_, tile_, align_;
  i32 n_;
  Schedule schedule_;
};

// PartKeys for kernels that are short of registers. One thread finds the tiles, two ahead, and stores them to shared memory. All threads of
// the block call next() together, and meet at a barrier between any two calls except the first two.
class SharedKeys {
public:
  struct Memory {
    PartKeys keys;
    PartKeyTile ring[4];
    i32 there[4];
  };

  template <class... Arguments> __device__ __forceinline__ explicit SharedKeys(Memory &memory, Arguments... arguments) : m_(memory) {
    if (threadIdx.x == 0) {
      m_.keys = PartKeys(arguments...);
      find(0), find(1);
    }
    __syncthreads();
  }
  __device__ __forceinline__ bool next(PartKeyTile &tile) {
    const i32 at = n_++ % 4;
    if (threadIdx.x == 0) find((at + 2) % 4);
    tile = m_.ring[at];
    return m_.there[at];
  }

private:
  __device__ __forceinline__ void find(i32 at) { m_.there[at] = m_.keys.next(m_.ring[at]); }

  Memory &m_;
  u32 n_ = 0;
};

struct PartQueryTile {
  i32 begin, end; // positions
  i32 masked;     // some key of the tile is hidden from some query
  i32 shift;      // row = position + shift
  i32 number;     // the tile's number within the sequence
};

// The tiles of queries that see some of the keys [k0, k1), which lie within one range and one mask block.
template <bool kBlocks, int kTile> class PartQueries {
public:
  PartQueries() = default;
  // band.seqlen_k: the position at which the keys' range ends.
  __device__ __forceinline__ PartQueries(const HeldRanges &ranges, const Band &band, i64 k0, i64 k1, i64 tile_k, const BlockRow &row)
      : ranges_(ranges), band_(band), row_(row), k0_(k0), k1_(k1), tile_k_(tile_k), n_(ranges.count) {
    next_range();
  }
  __device__ __forceinline__ bool next(PartQueryTile &tile) {
    for (;;) {
      if (n_ < 0) return false;
      QueryTile t;
      if (!tiles_.next(t) || t.begin + origin() + kTile <= range_.start) {
        next_range();
        continue;
      }
      const i32 at = t.begin + origin();
      tile.begin = max(at, range_.start), tile.end = min(at + kTile, range_.end());
      tile.masked = t.masked || at < range_.start;
      // The range begins within the tile. If only queries before that see these keys, the tile is skipped.
      if (at < range_.start && intersect(band_.keys_any(tile.begin, tile.end), {k0_, k1_}).empty()) continue;
      tile.shift = range_.shift();
      tile.number = number_of_first(range_, n_, kTile, kBlocks) + (i32)((u32)(at - first_of_tiles(range_, kTile, kBlocks)) / (u32)kTile);
      return true;
    }
  }

private:
  // The position from which tiles_ counts. It is the beginning of the range, so that tiles begin there; with block sparsity it is 0.
  __device__ __forceinline__ i32 origin() const { return kBlocks ? 0 : range_.start; }
  __device__ __forceinline__ void next_range() {
    do {
      if (--n_ < 0) return;
      range_ = ranges_.at(n_);
    } while (range_.length == 0);
    Band band = band_;
    band.low += origin(), band.high += origin(), band.seqlen_q = range_.end() - origin();
    tiles_ = {band, k0_, k1_, tile_k_, row_};
  }

  HeldRanges ranges_;
  Band band_;
  BlockRow row_;
  i64 k0_, k1_, tile_k_;
  i32 n_;
  HeldRange range_;
  QueryTiles<kBlocks, kTile> tiles_;
};

} // namespace strobe
