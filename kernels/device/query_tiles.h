// The transposed schedule, for kernels that own a tile of keys: the tiles of queries that see some of these keys, from the last to the
// first. Under a causal mask all key tiles of a head thus begin with the same queries, and key tiles that add in ascending order wait only
// briefly. Positions have 32 bits; Schedule would take too many registers.
#pragma once
#include "../attention/schedule.h"

namespace strobe {

struct QueryTile {
  i32 begin;        // a multiple of the tile
  i32 masked;       // some key of the tile is hidden from some query by position
  const i32 *entry; // its block's entry in the list, with a block mask
};

// Tiles of kTile queries on a fixed grid; kTile divides the number of queries in a block of the block mask. kEnds: the walk ends at the
// first block before the queries that see some key, instead of reading the rest of the list.
template <bool kBlocks, int kTile, bool kEnds = false> class QueryTiles {
public:
  QueryTiles() = default;
  // The keys [k0, k1) lie within one mask block. row: the kept blocks of queries for that mask block.
  __device__ __forceinline__ QueryTiles(const Band &band, i64 k0, i64 k1, i64 tile_k, const BlockRow &row) {
    Band t = band.transposed();
    Range any = t.keys_any(k0, k1), all = t.keys_all(k0, k1);
    any = intersect(any, {0, band.seqlen_q}), all = intersect(all, {0, band.seqlen_q});
    begin_ = any.empty() ? 0 : (i32)any.begin, end_ = any.empty() ? 0 : (i32)any.end;
    bool partial = k1 - k0 < tile_k;
    all_begin_ = partial ? 0 : (i32)all.begin, all_end_ = partial ? 0 : (i32)all.end;
    if constexpr (kBlocks) {
      row_ = row;
      entry_ = (i32)row.count;
      next_ = 0, floor_ = kEnds ? 1 << 30 : 0;
    } else {
      next_ = (i32)round_up(end_, kTile), floor_ = (i32)round_down(begin_, kTile);
    }
  }
  __device__ __forceinline__ bool next(QueryTile &tile) {
    if constexpr (kBlocks) {
      while (next_ <= floor_) {
        if (entry_ == 0 || (kEnds && floor_ <= begin_)) return false;
        i64 block = max(0ll, (i64)row_.cols[--entry_]) * row_.block;
        next_ = (i32)round_up(min(block + row_.block, (i64)end_), kTile);
        floor_ = (i32)min(max(block, round_down(begin_, kTile)), 1ll << 30);
      }
    } else {
      if (next_ <= floor_) return false;
    }
    next_ -= kTile;
    tile = {next_, next_ < all_begin_ || next_ + kTile > all_end_, kBlocks ? row_.cols + entry_ : nullptr};
    return true;
  }

private:
  i32 begin_, end_, all_begin_, all_end_; // queries that see some key; queries that see every key
  i32 next_, floor_;
  i32 entry_;
  BlockRow row_;
};

} // namespace strobe
