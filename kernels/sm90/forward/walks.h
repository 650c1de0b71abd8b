// The order in which the tiles of keys of an item come.
#pragma once
#include "../../attention/schedule.h"
#include "../arguments.h"
#include "rows.h"
#include "shared.h"

namespace strobe::sm90 {

// The share of the keys that the item walks over.
template <Config C> __device__ __forceinline__ BasicSchedule<i32>::Share share_of(const HopperForwardArguments &a, const Item &item) {
  if constexpr (C.chunked() && C.split) return {item.split(), 1, C.chunk()};
  return {item.split(), C.split ? a.splits : 1};
}
// The tiles of keys for a tile of queries.
template <Config C>
__device__ __forceinline__ BasicSchedule<i32> schedule(const HopperForwardArguments &a, const BasicBand<i32> &band, const Item &item,
                                                       const BasicSchedule<i32>::Share &share) {
  BlockRow row{nullptr, 0, 0};
  if constexpr (C.features.blocks) row = a.in.block_row<C.features>(item.b, item.h, item.q / a.in.blocks.row_tokens);
  const i32 end = min(item.q + queries_of_tile<C>(a), band.seqlen_q);
  return {band, item.q, end, C.tile_k, C.invariant ? C.tile_k : 16, row, share};
}
template <Config C>
__device__ __forceinline__ BasicSchedule<i32> schedule(const HopperForwardArguments &a, const BasicBand<i32> &band, const Item &item) {
  return schedule<C>(a, band, item, share_of<C>(a, item));
}

// A walk over a schedule's tiles, each chunk of keys twice. With kFixedByRow a query tile is computed in this way if its fast result is not
// finite: all rows take the first walk over a chunk; the rows that fail take the second walk, with a lagging reference (config.h).
template <Config C> class TwiceByChunk {
public:
  __device__ __forceinline__ TwiceByChunk(const HopperForwardArguments &a, const SharedMemory<C> &shared)
      : a_(a), shared_(shared), tiles_(of(-1)) {
    if constexpr (C.walks_chunks()) {
      const Item item = read<Item>(shared.item());
      const BasicBand<i32> band = narrow(a.in.sequence<C.features>(item.b).band);
      const BasicRange<i32> keys = band.keys_any(item.q, min(item.q + queries_of_tile<C>(a), band.seqlen_q));
      if (!keys.empty()) chunk_ = keys.begin / C.chunk(), end_ = (keys.end + C.chunk() - 1) / C.chunk();
      BasicKeyTile<i32> any;
      while (end_ - 1 > chunk_ && !of(end_ - 1).next(any)) --end_;
      tiles_ = of(chunk_);
    }
  }
  __device__ __forceinline__ bool next(BasicKeyTile<i32> &t) {
    while (!tiles_.next(t)) {
      if (again_ && ++chunk_ >= end_) return false;
      again_ = !again_;
      tiles_ = of(chunk_);
    }
    return true;
  }
  // The number of the run that contains the tile last returned by next().
  __device__ __forceinline__ i32 run() const { return 2 * chunk_ + again_; }
  // If that tile begins a run: the mark of the tile before it, which is the last one of a walk over a chunk, or of the first walk over the
  // final chunk.
  __device__ __forceinline__ Tile::Last before() const {
    return again_ && chunk_ + 1 >= end_ ? Tile::kLastBeforeAgain : Tile::kLastOfChunk;
  }

private:
  // The tiles of one chunk; of all keys if chunk < 0. The item is read again each time, so that it takes no registers.
  __device__ __forceinline__ BasicSchedule<i32> of(i32 chunk) const {
    const Item item = read<Item>(shared_.item());
    const BasicBand<i32> band = narrow(a_.in.sequence<C.features>(item.b).band);
    if (!C.walks_chunks() || chunk < 0) return schedule<C>(a_, band, item);
    return schedule<C>(a_, band, item, {chunk, 1, C.chunk()});
  }
  const HopperForwardArguments &a_;
  const SharedMemory<C> &shared_;
  BasicSchedule<i32> tiles_;
  i32 chunk_ = 0, end_ = 1;
  bool again_ = false;
};

// A walk over a schedule's keys in another order: from the key opposite the last query downwards, and then upwards from there. A
// penalty then grows from tile to tile, so that the fixed reference holds. If the window ends on the left, the walk begins at the last
// visible key, because the keys that a warpgroup sees must be one run in this order too.
class FromDiagonal {
public:
  __device__ __forceinline__ FromDiagonal(const BasicBand<i32> &band, i32 q0, i32 q1, i32 tile)
      : any_(band.keys_any(q0, q1)), all_(band.keys_all(q0, q1)), tile_(tile) {
    any_.begin = any_.begin / 16 * 16;
    const i32 keys = (all_.begin > 0 ? any_.end : min(q1 + band.offset, any_.end)) - any_.begin;
    down_ = up_ = any_.begin + (i32)((u32)max(keys + tile - 1, 0) / (u32)tile) * tile;
  }
  __device__ __forceinline__ bool next(BasicKeyTile<i32> &t) {
    if (down_ > any_.begin)
      t.begin = down_ -= tile_;
    else if (up_ < any_.end)
      t.begin = up_, up_ += tile_;
    else
      return false;
    t.end = min(t.begin + tile_, any_.end);
    t.masked = t.begin < all_.begin || t.end > all_.end;
    return true;
  }

private:
  BasicRange<i32> any_, all_;
  i32 tile_, down_, up_;
};

// A walk over the kept blocks of a query tile, where the call says which blocks the function of the mask sees as a whole. Entries of the
// list are read one block ahead, so that the loading thread does not wait for memory, and the walk ends at the first block past the visible
// keys. Adjacent blocks are walked as one run if both are full, or if neither is.
template <i32 kTile> class KnownBlocks {
public:
  __device__ __forceinline__ KnownBlocks(const BasicBand<i32> &band, i32 q0, i32 q1, const BlockRow &row)
      : any_(band.keys_any(q0, q1)), all_(band.keys_all(q0, q1)), row_(row), left_((i32)row.count),
        block_(max((i32)min(row.block, (i64)band.seqlen_k), 1)) {
    read_ahead();
  }
  __device__ __forceinline__ bool next(BasicKeyTile<i32> &t) {
    while (next_ >= end_) {
      const i32 begin = column_ * block_;
      if (column_ < 0 || begin >= any_.end) return false;
      next_ = max(begin, any_.begin / kAlign * kAlign), end_ = min(begin + block_, any_.end), full_ = mark_;
      read_ahead();
    }
    while (end_ - next_ < kTile && end_ < any_.end && column_ >= 0 && column_ * block_ == end_ && (mark_ != 0) == (full_ != 0)) {
      end_ = min(end_ + block_, any_.end);
      read_ahead();
    }
    t.begin = next_, t.end = min(next_ + kTile, end_);
    t.masked = t.begin < all_.begin || t.end > all_.end, t.open = !full_;
    next_ = t.end;
    return true;
  }

private:
  enum : i32 { kAlign = 16, kMost = 1 << 30 };
  // Reads the next entry into column_ and mark_. Columns are limited, never trusted.
  __device__ __forceinline__ void read_ahead() {
    column_ = -1;
    if (left_ <= 0) return;
    column_ = (i32)min((u32)*row_.cols, (u32)kMost / (u32)block_), mark_ = row_.is_full(0);
    ++row_.cols, --left_;
  }

  BasicRange<i32> any_, all_;
  BlockRow row_;
  i32 left_, block_, next_ = 0, end_ = 0;
  i32 column_, mark_ = 0, full_ = 0;
};

} // namespace strobe::sm90
