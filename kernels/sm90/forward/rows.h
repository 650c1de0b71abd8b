// Maps a row of a query tile to its query and head. A tile may hold several query heads of a key head (Config::packed). In a product, rows
// do not depend on one another, so a row has the same bits as in a tile of one head.
#pragma once
#include "../../attention/part.h"
#include "../arguments.h"
#include "shared.h"

namespace strobe::sm90 {

struct RowPlace {
  i32 i, h; // query and head; the query of a row that does not exist is kNoQuery, which is past all sequences
};
enum : i32 { kNoQuery = 1 << 30 };

// The sequence of the item with number n, as the item's query tile sees it. In a part, position i is row q0 + i, and positions from the
// band's seqlen_q on have no row.
template <Config C>
__device__ __forceinline__ Sequence sequence_of(const Inputs &in, const SharedMemory<C> &shared, const Item &item, u32 n) {
  if constexpr (!C.features.part) return in.sequence<C.features>(item.b);
  const HeldRows rows = in.held(item.b);
  const HeldQueries held = read<HeldQueries>(shared.held(n));
  Sequence s{rows.q0 + held.shift, rows.k0, Band::make(held.seqlen_q, held.seqlen_k, in.bottom_right != 0, in.left, in.right)};
  s.band.seqlen_q = held.end;
  return s;
}

// The arguments with their packed heads, for kernels with Config::packed.
__device__ __forceinline__ const PackedForwardArguments &packed(const HopperForwardArguments &a) {
  return static_cast<const PackedForwardArguments &>(a);
}
// To how many queries the rows of a warpgroup belong; and those of a whole query tile.
template <Config C> __device__ __forceinline__ i32 queries_of_warpgroup(const HopperForwardArguments &a) {
  return C.packed ? (i32)packed(a).queries.by : 64;
}
template <Config C> __device__ __forceinline__ i32 queries_of_tile(const HopperForwardArguments &a) {
  return C.warpgroups * queries_of_warpgroup<C>(a);
}
// Packed: the query heads of an item; and the query and head of row r of warpgroup w.
__device__ __forceinline__ BasicRange<i32> packed_heads(const HopperForwardArguments &a, const Item &item) {
  const i32 end = ((i32)a.group_divisor.divide(item.h) + 1) * a.in.group;
  return {item.h, min(item.h + packed(a).packed, end)};
}
__device__ __forceinline__ RowPlace packed_place(const HopperForwardArguments &a, const Item &item, int w, i32 r) {
  const i32 queries = (i32)packed(a).queries.by, n = (i32)packed(a).queries.divide((u32)r), h = item.h + n;
  return h < packed_heads(a, item).end ? RowPlace{item.q + w * queries + r - n * queries, h} : RowPlace{kNoQuery, item.h};
}

} // namespace strobe::sm90
