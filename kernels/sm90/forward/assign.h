// One thread of a block determines which items (query tiles, or their splits) the block computes.
#pragma once
#include "../../attention/packed_tiles.h"
#include "../arguments.h"
#include "../part.h"
#include "rows.h"
#include "shared.h"
#include "tickets.h"

namespace strobe::sm90 {

template <Config C> struct Assign {
  const HopperForwardArguments &a;
  const Inputs &in;
  const SharedMemory<C> &shared;
  u32 told = 0, verdicts = 0;

  __device__ __forceinline__ void all() {
    // If items take different times, the block draws the next item only when the current one has been loaded. Drawing earlier would give a
    // block an item while two others are still to be computed, and would distribute the last items badly. If all items take the same time,
    // the block draws earlier, so that no warp waits for a ticket.
    const bool even = !C.features.band && !C.features.blocks && !in.cu_seqlens_q && !C.features.seqused && !C.features.pages;
    Item before{0, 0, 0, kNone};
    bool first = true;
#pragma unroll 1
    for (u32 x = blockIdx.x, next; x < a.items; x = next) {
      const Item item = this->item(x);
      const bool some = item.kind() != kNone;
      if (some) tell(item);
      if (even) next = draw(first);
      if (some) {
        judge(before);
        before = item;
      }
      if (!even) {
        if (some) wait_loaded();
        next = draw(first);
      }
    }
    judge(before);
    tell({0, 0, 0, kNone});
  }

  // Draws the number of the next item: a.items or more if there is none.
  __device__ __forceinline__ u32 draw(bool &first) const {
    if (gridDim.x >= a.items) return a.items;
    const u32 ticket = first ? first_ticket(a.tickets) : next_ticket(a.tickets);
    first = false;
    if (ticket == a.items - 1) return_tickets(a.tickets);
    return gridDim.x + ticket;
  }
  // The item with number x. Within a bundle of heads the last tile comes first (under a causal mask the longest). Packed sequences count as
  // one batch here, because tiles are numbered through all sequences. C.packed: several heads share a tile.
  __device__ __forceinline__ Item item(u32 x) const {
    const u32 split = C.split ? x - a.splits_divisor.divide(x) * a.splits_divisor.by : 0;
    if constexpr (C.split) x = a.splits_divisor.divide(x);
    const u32 bundle = a.bundle_items.divide(x), within = x - bundle * a.bundle_items.by, tile = a.bundle_divisor.divide(within);
    const u32 head = bundle * a.bundle_divisor.by + within - tile * a.bundle_divisor.by, b = a.heads_divisor.divide(head);
    const u32 h = head - b * a.heads_divisor.by;
    if (b >= (in.cu_seqlens_q && !C.features.part ? 1 : (u32)in.batch)) return {0, 0, 0, kNone}; // the last bundle is not full
    if constexpr (C.features.part) return held_item((i32)b, h, a.tiles - 1 - (i32)tile);
    const i32 number = a.tiles - 1 - (i32)tile, queries = queries_of_tile<C>(a);
    Item item{(i32)b, C.packed ? first_head(h) : (i32)h, number * queries, (i32)split * Item::kKinds + kFast};
    if (in.cu_seqlens_q) {
      const PackedTile of = packed_tile(in.cu_seqlens_q, in.total_q, in.batch, queries, number);
      item.b = of.b, item.q = of.begin;
      const i64 count = in.held<C.features>(of.b).seqlen_q;
      if (of.begin < 0 || of.begin >= count || count < a.least_queries || count > a.most_queries) item.how = kNone;
    }
    return item;
  }
  __device__ __forceinline__ i32 first_head(u32 piece) const {
    const u32 kv = packed(a).pieces.divide(piece);
    return (i32)kv * in.group + (i32)(piece - kv * packed(a).pieces.by) * packed(a).packed;
  }
  __device__ __forceinline__ Item held_item(i32 b, u32 head, i32 number) const {
    const i32 count = in.part->count_q, n = range_of_tile(count, number, [&](i32 n) { return first_number(b, n); }); // as in part_tile
    if (count == 0) return {b, (i32)head, 0, kNone};
    const HeldRange r = held_range_of_queries(in, b, n);
    const i32 q = r.start + (number - first_number(b, n)) * C.tile_q();
    return {b, (i32)head, q, q < r.end() ? kFast : kNone};
  }
  __device__ __forceinline__ void tell_held(const Item &item) const {
    if (item.kind() == kNone) return;
    // The range that contains the tile: the first one that ends after the tile's begin, or else the last one.
    const i32 n = first_where(in.part->count_q - 1, [&](i32 n) { return range_of_queries(in, item.b, n).end() > item.q; });
    const HeldRange r = held_range_of_queries(in, item.b, n);
    const PartTable &t = *in.part;
    write(shared.held(told), min(item.q + C.tile_q(), r.end()), r.shift(), t.words()[t.whole_q + item.b * t.step_whole_q],
          t.words()[t.whole_k + item.b * t.step_whole_k]);
  }
  __device__ __forceinline__ i32 first_number(i32 b, i32 n) const {
    return number_of_first(range_of_queries(in, b, n), n, C.tile_q(), false);
  }
  // Waits until all warps have read the last item, and all loads of the item's keys have been issued. Loads of its values have been issued
  // too, unless they are paged.
  __device__ __forceinline__ void wait_loaded() const { mbarrier_wait(shared.item_empty(), told % 2 ^ 1); }
  __device__ __forceinline__ void tell(const Item &item) {
    wait_loaded();
    if constexpr (C.features.part) tell_held(item);
    ++told;
    write(shared.item(), item.b, item.h, item.q, item.how);
    mbarrier_arrive(shared.item_full());
  }
  // Waits for the consumers' verdict on an item that was computed fast. If it failed, assigns the item again, as kSafe. (The next item
  // still begins as kFast: how an item is computed must not depend on which block computes it.)
  __device__ __forceinline__ void judge(const Item &item) {
    if (item.kind() != kFast) return;
    const u32 n = verdicts++;
    mbarrier_wait(shared.judged(n), n / 2 % 2);
    if (!load_shared(shared.failed(n))) return;
    store_shared(shared.failed(n), 0);
    tell(item.safely());
  }
};

} // namespace strobe::sm90
