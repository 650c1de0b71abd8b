// One producer thread of a block has the copy engine load K and V, tile by tile; another one loads Q. Where K and V are paged, one warp
// loads K and another one V. Three questions are answered apart: which tiles come, and when (walks.h); where their rows lie (source.h;
// parts of a problem: part.h); and whether they are tiles that wgmma reads, or quantised and become such tiles first (stored.h).
#pragma once
#include "../arguments.h"
#include "eight_bits.h"
#include "part.h"
#include "rows.h"
#include "shared.h"
#include "source.h"
#include "stored.h"
#include "walks.h"

namespace strobe::sm90 {

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
      load(item, items);
    }
  }
  // The queries of the item with number n. Where a warp loads them, all its lanes call it.
  __device__ __forceinline__ void load(const Item &item, u32 n) const {
    const i32 row = (i32)first_row(item, n) + item.q;
#pragma unroll 1
    for (int w = 0; w < C.warpgroups; ++w) {
      mbarrier_wait(shared.q_empty(w), n % 2 ^ 1);
      if constexpr (SharedMemory<C>::kDequantises) {
        __syncwarp();
        if (elected()) load(item, row, w);
        __syncwarp();
      } else {
        load(item, row, w);
      }
    }
  }

private:
  // The row of the tensors where position 0 lies, or would lie.
  __device__ __forceinline__ i64 first_row(const Item &item, u32 n) const {
    if constexpr (C.features.part) return sequence_of(a.in, shared, item, n).q0;
    return a.in.held<C.features>(item.b).q0;
  }
  // Loads the queries of warpgroup w. row: the item's first one.
  __device__ __forceinline__ void load(const Item &item, i32 row, int w) const {
    if constexpr (C.packed) return load_packed(item, row, w);
    mbarrier_expect(shared.q_full(w), C.q_bytes() / C.warpgroups);
    for (int c = 0; c < C.columns(); c += 64)
      tma_load(shared.q + 64 * w * 2 * C.columns() + 64 * kRowBytes * (c / 64), a.tma_q.map, shared.q_full(w), c, row + 64 * w,
               item.h * a.tma_q.head_step, item.b * a.tma_q.batch_step);
  }
  // Loads the heads of the piece. In the last piece, rows past the last head are zeros or belong to another piece.
  __device__ __forceinline__ void load_packed(const Item &item, i32 row, int w) const {
    mbarrier_expect(shared.q_full(w), 2 * C.columns() * packed(a).queries.by * (u32)packed(a).packed);
    for (int c = 0; c < C.columns(); c += 64)
      tma_load(shared.q + 64 * w * 2 * C.columns() + 64 * kRowBytes * (c / 64), a.tma_q.map, shared.q_full(w), c,
               row + w * (i32)packed(a).queries.by, item.h, item.b * a.tma_q.batch_step);
  }
};

template <Config C> struct Load {
  static constexpr int kN = C.tile_k;
  // If K and V are paged, one warp loads K here and another one V in LoadV. Otherwise one thread loads both. (An enum leaves no symbol in
  // kernels that do not use it.)
  enum : bool { kStored = C.features.quant != 0, kPaged = C.features.pages != 0 && !kStored };
  static constexpr bool kKnown = C.features.blocks == kFullKnown && !C.split && !C.invariant;
  static constexpr bool kFromDiagonal = C.features.penalty && !C.features.blocks && !C.split && C.reference == kFixed;
  const HopperForwardArguments &a;
  const Inputs &in;
  const SharedMemory<C> &shared;
  Stage<C> k{}, v{};
  u32 items = 0;
  // Quantised:
  StoredStage<C> to{};
  RowScales<C> scales; // of the stage before `to`, if it is pending: all but its scales is on its way
  bool pending = false;

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
    if constexpr (C.eight_bits) return load_eight_bits(item.b, tiles, next, more, k0, kv);
    if constexpr (kStored) return walk_stored(item.b, tiles, next, more, k0, kv);
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

  // Quantised K and V: loads K of a tile, then V of the one before it; and Q after the first K, since K comes earlier by being dequantised.
  template <class Tiles, class KeyTile>
  __device__ __forceinline__ void walk_stored(i32 b, Tiles &tiles, KeyTile next, bool more, i32 k0, i32 kv) {
    StoredRows<C> before(in, b, 0, 0), rows(in, b, next.begin, next.end);
    bool first = true, tiles_left = true;
#pragma unroll 1
    for (;; first = false) {
      const bool exists = tiles_left;
      StoredRows<C> ahead = rows;
      if (exists) {
        const KeyTile tile = next;
        const i32 run = C.invariant ? this->run(tiles, tile.begin) : 0;
        if constexpr (C.reference == kFixed) more = __shfl_sync(0xFFFFFFFFu, load_shared(shared.lost()), 0) != items && more;
        more = more && tiles.next(next);
        tiles_left = more;
        ahead = StoredRows<C>(in, b, more ? next.begin : 0, more ? next.end : 0); // looked up before this tile's waits
        const i32 lacking = rows.settle(in) * Tile::kLacks;
        i32 masked = lacking || tile.masked || tile.end - tile.begin < kN;
        if constexpr (C.features.blocks == kFullKnown) masked |= tile.open ? Tile::kOpen : 0;
        i32 last = !more;
        if constexpr (C.invariant) last = !more ? Tile::kLast : end_of_run(tiles, run, next.begin);
        load_stored_tile<false>(rows, b, lacking | masked, last, k0, kv);
      }
      if (first) {
        store_pending_scales();
        LoadQ<C>{a, shared}.load(read<Item>(shared.item()), items);
      } else {
        load_stored_tile<true>(before, b, 0, kStoredValue, k0, kv);
      }
      if (!exists) break;
      before = rows, rows = ahead;
    }
    store_pending_scales(); // what follows may wait for this tile
  }
  // Loads what is stored of a tile, K or V, with its scales.
  template <bool kValue>
  __device__ __forceinline__ void load_stored_tile(const StoredRows<C> &rows, i32 b, i32 masked, i32 last, i32 k0, i32 kv) {
    constexpr int kColumns = C.stored_columns(kValue ? C.head_dim_v : C.head_dim);
    const u32 full = shared.stored_full(to.index);
    const KeyScales &all = scales_of<C>(a);
    const Operand &of = kValue ? all.v : all.k;
    const bool half = kValue ? all.half_v : all.half_k;
    if (!__all_sync(0xFFFFFFFFu, mbarrier_test(shared.stored_empty(to.index), to.parity ^ 1))) {
      store_pending_scales();
      mbarrier_wait(shared.stored_empty(to.index), to.parity ^ 1);
      __syncwarp();
    }
    if (elected()) {
      write(shared.stored_message(to.index), kValue ? 0 : rows.begin, kValue ? 0 : rows.begin + rows.count, masked, last);
      mbarrier_expect(full, 2 * kN * kColumns);
    }
    __syncwarp();
    rows.template load<kColumns>(kValue ? a.tma_v : a.tma_k, full, shared.stored_tile(to.index), k0, kv, b);
    if constexpr (!kValue && C.features.by_column) {
      store_pending_scales();
      store_column_scales<C>(in, of, half, kv * of.stride[1], all.group, rows, k0, b, shared.scales(to.index));
      __syncwarp();
      if (elected()) mbarrier_arrive(full);
      __syncwarp();
    } else {
      RowScales<C> next;
      next.load(in, of, half, kv * of.stride[1], rows, k0, b);
      store_pending_scales();
      scales = next, pending = true;
    }
    to.advance();
  }
  // Stores the scales of a stage that is pending.
  __device__ __forceinline__ void store_pending_scales() {
    if (!pending) return;
    const int stage = (to.index == 0 ? C.stored_stages : to.index) - 1;
    scales.store(shared.scales(stage));
    __syncwarp();
    if (elected()) mbarrier_arrive(shared.stored_full(stage));
    __syncwarp();
    pending = false;
  }
  // Tells the warps that dequantise that no tile follows.
  __device__ __forceinline__ void end_stored() {
    mbarrier_wait(shared.stored_empty(to.index), to.parity ^ 1);
    __syncwarp();
    if (elected()) {
      write(shared.stored_message(to.index), 0, 0, 0, kStoredEnd);
      for (int n = 0; n < SharedMemory<C>::kFillsStored; ++n) mbarrier_arrive(shared.stored_full(to.index));
    }
    __syncwarp();
  }

  // FP8: loads K of a tile to where it is multiplied, and V to where it is transposed; and Q after the first K.
  template <class Tiles, class KeyTile>
  __device__ __forceinline__ void load_eight_bits(i32 b, Tiles &tiles, KeyTile next, bool more, i32 k0, i32 kv) {
    StoredRows<C> rows(in, b, next.begin, next.end);
#pragma unroll 1
    for (bool first = true;; first = false) {
      const KeyTile tile = next;
      const i32 run = C.invariant ? this->run(tiles, tile.begin) : 0;
      more = more && tiles.next(next);
      const StoredRows<C> ahead(in, b, more ? next.begin : 0, more ? next.end : 0); // looked up before this tile's waits
      const i32 lacking = rows.settle(in) * Tile::kLacks;
      i32 masked = lacking || tile.masked || tile.end - tile.begin < kN;
      if constexpr (C.features.blocks == kFullKnown) masked |= tile.open ? Tile::kOpen : 0;
      i32 last = !more;
      if constexpr (C.invariant) last = !more ? Tile::kLast : end_of_run(tiles, run, next.begin);
      load_k_of_eight_bits(rows, b, lacking | masked, last, k0, kv);
      if (first) LoadQ<C>{a, shared}.load(read<Item>(shared.item()), items);
      load_v_of_eight_bits(rows, b, k0, kv);
      if (!more) break;
      rows = ahead;
    }
  }
  __device__ __forceinline__ void load_k_of_eight_bits(const StoredRows<C> &rows, i32 b, i32 masked, i32 last, i32 k0, i32 kv) {
    const u32 full = shared.k_full(k.index);
    mbarrier_wait(shared.k_empty(k.index), k.parity ^ 1);
    __syncwarp();
    if (elected()) {
      write(shared.tile(k.index), rows.begin, rows.begin + rows.count, masked, last);
      mbarrier_expect(full, C.k_bytes());
    }
    __syncwarp();
    rows.template load<C.columns()>(a.tma_k, full, shared.k + k.index * C.k_bytes(), k0, kv, b);
    if constexpr (C.scaled_rows & kScaledKeys) {
      const KeyScales &all = scales_of<C>(a);
      scales.load(in, all.k, all.half_k, kv * all.k.stride[1], rows, k0, b);
      scales.store(shared.scales(k.index));
      __syncwarp();
      if (elected()) mbarrier_arrive(full);
      __syncwarp();
    }
    k.advance();
  }
  __device__ __forceinline__ void load_v_of_eight_bits(const StoredRows<C> &rows, i32 b, i32 k0, i32 kv) {
    constexpr int kColumns = C.stored_columns(C.head_dim_v);
    const u32 full = shared.stored_full(to.index);
    mbarrier_wait(shared.stored_empty(to.index), to.parity ^ 1);
    __syncwarp();
    if (elected()) {
      write(shared.stored_message(to.index), 0, 0, 0, kStoredValue);
      mbarrier_expect(full, 2 * kN * kColumns);
    }
    __syncwarp();
    rows.template load<kColumns>(a.tma_v, full, shared.stored_tile(to.index), k0, kv, b);
    to.advance();
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
    const i32 lacking = (i32)(rows.settle(in) * (u32)Tile::kLacks);
    if (elected()) {
      write(shared.tile(k.index), tile.begin, tile.end, lacking | (lacking || tile.masked || tile.end - tile.begin < kN), last);
      mbarrier_expect(shared.k_full(k.index), C.k_bytes() + (C.bias_by_tma ? a.bias_bytes : 0u));
      if constexpr (C.bias_by_tma) load_bias(item, tile.begin);
    }
    rows.template load<kN, C.columns(), C.page_rows>(a.tma_k, shared.k_full(k.index), shared.k + k.index * C.k_bytes(), kv);
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
    load_rows<kN, kColumns>(x, full, address, row, head, b);
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
        rows.template load<C.tile_k, C.columns_v(), C.page_rows>(a.tma_v, shared.v_full(stage.index), shared.v + stage.index * C.v_bytes(),
                                                                 kv);
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

} // namespace strobe::sm90
