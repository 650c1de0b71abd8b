// Which query of which head a row of a tile of queries is. Where few queries have many heads on a key head, a tile is of several heads
// (Config::packed): rows are independent of one another in all products, so their bits are the same either way.
#pragma once
#include "../../attention/part.h"
#include "../arguments.h"
#include "shared.h"

namespace strobe::sm90 {

struct RowPlace {
  i32 i, h; // a row that is not there: a query beyond all sequences
};
enum : i32 { kNoQuery = 1 << 30 };

// The sequence that item n is of, as its tile of queries sees it. Of a part: position i is row q0 + i, and none from the band's seqlen_q on
// is.
template <Config C>
__device__ __forceinline__ Sequence sequence_of(const Inputs &in, const SharedMemory<C> &shared, const Item &item, u32 n) {
  if constexpr (!C.features.part) return in.sequence<C.features.seqused>(item.b);
  const HeldRows rows = in.held(item.b);
  const HeldQueries held = read<HeldQueries>(shared.held(n));
  Sequence s{rows.q0 + held.shift, rows.k0, Band::make(held.seqlen_q, held.seqlen_k, in.bottom_right != 0, in.left, in.right)};
  s.band.seqlen_q = held.end;
  return s;
}

// Where Config::packed says so.
__device__ __forceinline__ const PackedForwardArguments &packed(const HopperForwardArguments &a) {
  return static_cast<const PackedForwardArguments &>(a);
}
// The query heads of warpgroup w.
__device__ __forceinline__ BasicRange<i32> packed_heads(const HopperForwardArguments &a, const Item &item, int w) {
  const i32 first = item.h + w * packed(a).packed, end = ((i32)a.group_divisor.divide(item.h) + 1) * a.in.group;
  return {first, min(first + packed(a).packed, end)};
}
// The query of warpgroup w's first row, or none; packed: the first one of all.
template <Config C> __device__ __forceinline__ i32 first_query(const HopperForwardArguments &a, const Item &item, int w) {
  if constexpr (!C.packed) return item.q + 64 * w;
  const BasicRange<i32> heads = packed_heads(a, item, w);
  return heads.begin < heads.end ? 0 : i32(kNoQuery);
}
// Of row r of warpgroup w, packed.
__device__ __forceinline__ RowPlace packed_place(const HopperForwardArguments &a, const Item &item, int w, i32 r) {
  const BasicRange<i32> heads = packed_heads(a, item, w);
  const i32 n = (i32)packed(a).queries.divide((u32)r), h = heads.begin + n;
  return h < heads.end ? RowPlace{r - n * (i32)packed(a).queries.by, h} : RowPlace{kNoQuery, item.h};
}

} // namespace strobe::sm90
