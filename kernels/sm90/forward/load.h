// One producer thread of a block has the copy engine load K and V, tile by tile; another one loads Q. Where K and V are paged, one warp
// loads K and another one V.
#pragma once
#include "../../attention/schedule.h"
#include "../../device/keys.h"
#include "../../ptx/tma.h"
#include "../arguments.h"
#include "part.h"
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

// A walk over a schedule's keys in another order: from the key opposite the last query downwards, and then upwards from there. ALiBi's
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

// Where a tile's rows lie in paged K or V. Each lane of the loading warp looks up 16 rows, which lie in one page.
struct PagedRows {
  enum : i32 { kCount = 16 };
  i32 row;   // the lane's first row within its page. A lane without rows has a row past the page's end, where the copy engine reads zeros
  u32 entry; // the table's entry: the number of a page, or a number that is no page
  // Looks up the lane's rows of the tile [begin, end), where begin is a multiple of kCount. Entries of the table past `end` are not read.
  __device__ __forceinline__ PagedRows(const Inputs &in, i32 b, i32 begin, i32 end) : row((i32)in.pages.size.by), entry(0) {
    const i32 j = begin + (i32)((u32)thread_index() % 32 * kCount);
    if (j >= end) return;
    const Divisor page = in.pages.size;
    __builtin_assume(page.by != 1); // a page holds a multiple of kCount keys
    const u32 n = page.divide((u32)j);
    row = j - (i32)(n * page.by), entry = (u32)in.pages.table_of(b)[n];
  }
  // Makes load() read zeros for rows whose page does not exist, and returns which lanes have such rows.
  __device__ __forceinline__ u32 settle(const Inputs &in) {
    const bool lacks = entry >= in.pages.count;
    if (lacks) row = (i32)in.pages.size.by;
    return __ballot_sync(0xFFFFFFFFu, lacks);
  }
  // Loads the tile: kN rows of kColumns columns.
  template <int kN, int kColumns> __device__ __forceinline__ void load(const MappedOperand &x, u32 full, u32 address, i32 head) const {
    const i32 page = (i32)entry * x.batch_step;
    // kBoxes limits how many boxes are issued without a break: there are no registers for more.
    constexpr int kGroups = kN / kCount, kBoxes = 6, kTogether = min(4, max(1, kBoxes * 64 / kColumns));
#pragma unroll
    for (int n = 0; n < kGroups; n += kTogether) {
      i32 row_of[kTogether], page_of[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether && n + i < kGroups; ++i)
        row_of[i] = __shfl_sync(0xFFFFFFFFu, row, n + i), page_of[i] = __shfl_sync(0xFFFFFFFFu, page, n + i);
      if (elected()) {
#pragma unroll
        for (int i = 0; i < kTogether && n + i < kGroups; ++i) {
#pragma unroll
          for (int c = 0; c < kColumns; c += 64)
            tma_load(address + (kN * (c / 64) + kCount * (n + i)) * kRowBytes, x.map, full, c, row_of[i], head * x.head_step, page_of[i]);
        }
      }
      __syncwarp();
    }
  }
};

template <Config C> struct Load {
  static constexpr int kN = C.tile_k;
  // If K and V are paged, one warp loads K here and another one V in LoadV. Otherwise one thread loads both. (An enum leaves no symbol in
  // kernels that do not use it.)
  enum : bool { kPaged = C.features.pages != 0 };
  static constexpr bool kKnown = C.features.blocks == kFullKnown && !C.split && !C.invariant;
  static constexpr bool kFromDiagonal = C.features.alibi && !C.features.blocks && !C.split && C.reference == kFixed;
  const HopperForwardArguments &a;
  const Inputs &in;
  const SharedMemory<C> &shared;
  Stage<C> k{}, v{};
  u32 items = 0;

  __device__ __forceinline__ void all() {
    tma_prefetch(a.tma_k.map);
    if constexpr (!kPaged) tma_prefetch(a.tma_v.map);
    if constexpr (C.bias_by_tma) tma_prefetch(a.tma_bias.map);
#pragma unroll 1
    for (;; ++items) {
      mbarrier_wait(shared.item_full(), items % 2);
      const Item item = read<Item>(shared.item());
      if (item.kind() == kNone) break;
      load(item);
      if (one()) mbarrier_arrive(shared.item_empty()); // not earlier: assign.h draws the next item when this one is loaded
    }
  }

  __device__ __forceinline__ void load(const Item &item) {
    const Sequence sequence = sequence_of(in, shared, item, items);
    const BasicBand<i32> band = narrow(sequence.band);
    if constexpr (C.features.part) return load(item, sequence, HeldKeys<C, true>(in, band, item));
    if constexpr (C.repeats_chunks()) {
      if (item.kind() != kFast) return load(item, sequence, TwiceByChunk<C>(a, shared));
    }
    if constexpr (kFromDiagonal)
      load(item, sequence, FromDiagonal(band, item.q, min(item.q + queries_of_tile<C>(a), band.seqlen_q), kN));
    else if constexpr (kKnown)
      load(item, sequence,
           KnownBlocks<kN>(band, item.q, min(item.q + queries_of_tile<C>(a), band.seqlen_q),
                           in.block_row<C.features>(item.b, item.h, item.q / in.blocks.row_tokens)));
    else
      load(item, sequence, schedule<C>(a, band, item));
  }
  template <class Tiles> __device__ __forceinline__ void load(const Item &item, const Sequence &sequence, Tiles tiles) {
    const i32 kv = (i32)a.group_divisor.divide(item.h), k0 = mapped_row(sequence, 0);
    using KeyTile = typename Either<C.features.part != 0, HeldKeyTile, BasicKeyTile<i32>>::type;
    KeyTile next;
    bool more = tiles.next(next);
    if (!more) next.begin = next.end = 0, next.masked = true;
    if constexpr (C.features.part) next.shift = more ? next.shift : 0;
    i32 before = -1; // the first row of the tile whose V is loaded next
#pragma unroll 1
    do {
      const KeyTile tile = next;
      const i32 run = C.invariant ? this->run(tiles, tile.begin) : 0;
      if constexpr (C.reference == kFixed && kPaged) // one lane reads for all, because a consumer may write lost() meanwhile
        more = __shfl_sync(0xFFFFFFFFu, load_shared(shared.lost()), 0) != items && more;
      else if constexpr (C.reference == kFixed)
        more = more && load_shared(shared.lost()) != items;
      more = more && tiles.next(next);
      if constexpr (kPaged) {
        load_k_in_pages(item, tile, C.invariant && more ? end_of_run(tiles, run, next.begin) : !more, kv);
        continue;
      }
      mbarrier_wait(shared.k_empty(k.index), k.parity ^ 1);
      i32 masked = tile.masked || tile.end - tile.begin < kN;
      if constexpr (C.features.blocks == kFullKnown) masked |= tile.open ? Tile::kOpen : 0;
      if constexpr (C.invariant)
        write(shared.tile(k.index), tile.begin, tile.end, masked, !more ? Tile::kLast : end_of_run(tiles, run, next.begin));
      else
        write(shared.tile(k.index), tile.begin, tile.end, masked, !more);
      load<C.columns()>(a.tma_k, shared.k_full(k.index), C.k_bytes() + (C.bias_by_tma ? a.bias_bytes : 0u),
                        shared.k + k.index * C.k_bytes(), k0 + first_row(tile), kv, item.b);
      if constexpr (C.bias_by_tma) load_bias(item, tile.begin);
      k.advance();
      if (before >= 0) load_v(k0 + before, kv, item.b);
      before = first_row(tile);
    } while (more);
    if constexpr (!kPaged) load_v(k0 + before, kv, item.b);
  }

  // If keys are walked by chunks: the number of the chunk that contains the tile at `begin`.
  template <class Tiles> static __device__ __forceinline__ i32 run(const Tiles &, i32 begin) {
    return C.walks_chunks() ? (i32)((u32)begin / C.chunk()) : 0;
  }
  static __device__ __forceinline__ i32 run(const TwiceByChunk<C> &tiles, i32) { return tiles.run(); }
  // The value of Tile::last for a tile of `run`, if the next tile begins at `next`.
  template <class Tiles> static __device__ __forceinline__ i32 end_of_run(const Tiles &tiles, i32 run, i32 next) {
    return Load::run(tiles, next) != run ? Tile::kLastOfChunk : 0;
  }
  static __device__ __forceinline__ i32 end_of_run(const TwiceByChunk<C> &tiles, i32 run, i32) {
    return tiles.run() != run ? tiles.before() : 0;
  }
  __device__ __forceinline__ void load_v(i32 row, i32 kv, i32 b) {
    mbarrier_wait(shared.v_empty(v.index), v.parity ^ 1);
    load<C.columns_v()>(a.tma_v, shared.v_full(v.index), C.v_bytes(), shared.v + v.index * C.v_bytes(), row, kv, b);
    v.advance();
  }
  // Whether this thread writes the messages.
  static __device__ __forceinline__ bool one() {
    if constexpr (!kPaged) return true;
    return elected();
  }
  __device__ __forceinline__ void load_k_in_pages(const Item &item, const BasicKeyTile<i32> &tile, i32 last, i32 kv) {
    PagedRows rows(in, item.b, tile.begin, tile.end);
    mbarrier_wait(shared.k_empty(k.index), k.parity ^ 1);
    const i32 lacking = (i32)rows.settle(in) * Tile::kLacks;
    if (elected()) {
      write(shared.tile(k.index), tile.begin, tile.end, lacking | (lacking || tile.masked || tile.end - tile.begin < kN), last);
      mbarrier_expect(shared.k_full(k.index), C.k_bytes() + (C.bias_by_tma ? a.bias_bytes : 0u));
      if constexpr (C.bias_by_tma) load_bias(item, tile.begin);
    }
    rows.template load<kN, C.columns()>(a.tma_k, shared.k_full(k.index), shared.k + k.index * C.k_bytes(), kv);
    k.advance();
  }
  // Loads a tile of the bias, which arrives together with K.
  __device__ __forceinline__ void load_bias(const Item &item, i32 column) {
    for (i32 c = 0; c < C.tile_k; c += 64) {
      const u32 address = shared.bias + k.index * C.bias_bytes() + c / 64 * C.bias_columns();
      for (i32 w = 0; w < (a.bias_rows_step ? C.warpgroups : 1); ++w)
        tma_load(address + 64 * kRowBytes * w, a.tma_bias.map, shared.k_full(k.index), column + c, (item.q + 64 * w) * a.bias_rows_step,
                 item.h * a.tma_bias.head_step, item.b * a.tma_bias.batch_step);
    }
  }
  template <int kColumns>
  static __device__ __forceinline__ void load(const MappedOperand &x, u32 full, u32 bytes, u32 address, i32 row, i32 head, i32 b) {
    mbarrier_expect(full, bytes);
#pragma unroll
    for (int c = 0; c < kColumns; c += 64)
      tma_load(address + kN * kRowBytes * (c / 64), x.map, full, c, row, head * x.head_step, b * x.batch_step);
  }
};

// Loads paged V, in a warp of its own. It reads from the messages which tiles the warp that loads K has taken.
template <Config C> struct LoadV {
  const HopperForwardArguments &a;
  const Inputs &in;
  const SharedMemory<C> &shared;

  __device__ __forceinline__ void all() {
    tma_prefetch(a.tma_v.map);
    Stage<C> stage{};
#pragma unroll 1
    for (u32 items = 0;; ++items) {
      mbarrier_wait(shared.item_full(), items % 2);
      const Item item = read<Item>(shared.item());
      release(shared.item_empty());
      if (item.kind() == kNone) break;
      const i32 kv = (i32)a.group_divisor.divide(item.h);
      bool more;
#pragma unroll 1
      do {
        mbarrier_wait(shared.k_full(stage.index), stage.parity);
        const Tile tile = read<Tile>(shared.tile(stage.index));
        PagedRows rows(in, item.b, tile.begin, tile.end);
        more = tile.last != Tile::kLast;
        release(shared.k_empty(stage.index));
        rows.settle(in);
        mbarrier_wait(shared.v_empty(stage.index), stage.parity ^ 1);
        if (elected()) mbarrier_expect(shared.v_full(stage.index), C.v_bytes());
        rows.template load<C.tile_k, C.columns_v()>(a.tma_v, shared.v_full(stage.index), shared.v + stage.index * C.v_bytes(), kv);
        stage.advance();
      } while (more);
    }
  }

private:
  // Frees a message, after all lanes have read it.
  static __device__ __forceinline__ void release(u32 empty) {
    __syncwarp();
    if (elected()) mbarrier_arrive(empty);
  }
};

template <Config C> struct LoadQ {
  const HopperForwardArguments &a;
  const SharedMemory<C> &shared;

  // Loads Q for one warpgroup after another, as each finishes its last tile.
  __device__ __forceinline__ void all() {
    tma_prefetch(a.tma_q.map);
#pragma unroll 1
    for (u32 items = 0;; ++items) {
      mbarrier_wait(shared.item_full(), items % 2);
      const Item item = read<Item>(shared.item());
      mbarrier_arrive(shared.item_empty());
      if (item.kind() == kNone) break;
      const i32 row = (i32)first_row(item, items) + item.q;
#pragma unroll 1
      for (int w = 0; w < C.warpgroups; ++w) {
        mbarrier_wait(shared.q_empty(w), items % 2 ^ 1);
        if constexpr (C.packed) {
          load_packed(item, row, w);
          continue;
        }
        mbarrier_expect(shared.q_full(w), C.q_bytes() / C.warpgroups);
        for (int c = 0; c < C.columns(); c += 64)
          tma_load(shared.q + 64 * w * 2 * C.columns() + 64 * kRowBytes * (c / 64), a.tma_q.map, shared.q_full(w), c, row + 64 * w,
                   item.h * a.tma_q.head_step, item.b * a.tma_q.batch_step);
      }
    }
  }

private:
  // The row of the tensors where position 0 lies, or would lie.
  __device__ __forceinline__ i64 first_row(const Item &item, u32 n) const {
    if constexpr (C.features.part) return sequence_of(a.in, shared, item, n).q0;
    return a.in.held<C.features>(item.b).q0;
  }
  // Loads the heads of the piece. In the last piece, rows past the last head are zeros or belong to another piece.
  __device__ __forceinline__ void load_packed(const Item &item, i32 row, int w) const {
    mbarrier_expect(shared.q_full(w), 2 * C.columns() * packed(a).queries.by * (u32)packed(a).packed);
    for (int c = 0; c < C.columns(); c += 64)
      tma_load(shared.q + 64 * w * 2 * C.columns() + 64 * kRowBytes * (c / 64), a.tma_q.map, shared.q_full(w), c,
               row + w * (i32)packed(a).queries.by, item.h, item.b * a.tma_q.batch_step);
  }
};

} // namespace strobe::sm90
