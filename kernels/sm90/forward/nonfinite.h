// How infinities and NaN in V are treated when a query tile is computed again: they are cleared in the tiles, and at the end added to the
// results of the queries that see them.
#pragma once
#include "../../device/nonfinite.h"
#include "load.h"
#include "rows.h"
#include "warpgroup.h"

namespace strobe::sm90 {

// How exactly scores are computed.
template <Config C> __device__ constexpr Functions functions_of() {
  if (C.invariant && C.features.given()) return Functions::half_rounded;
  return C.reference != kExact ? Functions::rough : Functions::half;
}

// Clears the numbers in a tile of V that are not finite; add_nonfinite() adds them later.
template <Config C> __device__ __forceinline__ void clear_nonfinite_v(const Warpgroup<C> &group, const Stage<C> &value) {
  using T = typename Element<C.dtype>::type;
  mbarrier_wait(group.shared.v_full(value.index), value.parity);
#pragma unroll 1
  for (i32 i = (i32)threadIdx.x % 128 * 4; i < C.v_bytes();
       i += 128 * 4) { // 4 bytes at a time: few registers are left beside S, O, P and Q
    const u32 place = group.shared.v + value.index * C.v_bytes() + i, x = load_shared(place);
    const u32 bad = C.eight_bits ? nan_bytes(x) : spread(nonfinite<T>(x));
    if (bad) store_shared(place, x & ~bad);
  }
  async_proxy_fence();
  group.together();
}

// V of a sequence, as the tiles hold it.
template <Config C> __device__ __forceinline__ auto values_of(const HopperForwardArguments &a, const Sequence &s, i32 b, i32 kv) {
  using T = typename Element<C.dtype>::type;
  if constexpr (C.features.quant)
    return DequantisedRows<T, C.features>(a.in.v, scales_of<C>(a).v, scales_of<C>(a).half_v, a.in, s, b, kv);
  else
    return v_of<T, C.features>(a.in, s, b, kv);
}

// The address of a row of this split's partial O.
__device__ __forceinline__ float *partial_out(const HopperForwardArguments &a, const Item &item, i32 h, i64 row) {
  return a.partial_out + (item.split() * a.in.rows() + a.in.row_index(item.b, h, row)) * a.in.head_dim_v;
}

template <Config C> struct Results {
  const HopperForwardArguments &a;
  const Item &item;
  i64 q0;
  i32 first, queries, count; // the first query and the number of queries in each head; the number of rows in all heads
  __device__ __forceinline__ i32 query(i32 r) const { return first + (C.packed ? r % queries : r); }
  __device__ __forceinline__ i32 head(i32 r) const { return item.h + (C.packed ? r / queries : 0); }
  __device__ __forceinline__ void add(i32 r, i32 c, float x) const {
    if constexpr (C.split) {
      partial_out(a, item, head(r), q0 + query(r))[c] += x;
    } else {
      using Out = Result<C.dtype, C.features.partial != 0>;
      Out *o = a.out.template at<Out>(item.b, head(r), q0 + query(r), c);
      *o = Convert<Out>::from(to_float(*o) + x);
    }
  }
};
template <Config C> __device__ __forceinline__ Results<C> results_of(const Warpgroup<C> &group, const Item &item, i64 q0, i32 seqlen_q) {
  const i32 most = queries_of_warpgroup<C>(group.a), first = item.q + most * group.w, queries = max(0, min(most, seqlen_q - first));
  if constexpr (!C.packed) return {group.a, item, q0, first, queries, queries};
  const BasicRange<i32> heads = packed_heads(group.a, item);
  return {group.a, item, q0, first, queries, (heads.end - heads.begin) * queries};
}
template <Config C, class Scores, class Keys>
__device__ __forceinline__ void add_nonfinite_of_part(const Item &item, const Sequence &sequence, const Scores &scores,
                                                      const Dropout<C.features> &dropout, const Keys &value, const Results<C> &results) {
  HeldKeys<C, false> tiles(scores.in, narrow(sequence.band), item);
  HeldKeyTile t;
#pragma unroll 1
  while (tiles.next(t)) {
    const Keys own(value.x, value.row(t.shift), value.columns);
    if (C.features.hides() || t.masked || t.end - t.begin < C.tile_k)
      strobe::add_nonfinite<128>(scores, dropout, own, {t.begin, t.end}, {nullptr, 0, 0}, results, (int)threadIdx.x % 128);
  }
}
template <Config C>
__device__ __forceinline__ void add_nonfinite(const Warpgroup<C> &group, const Item &item, const Dropout<C.features> &dropout) {
  constexpr Features F = C.features;
  const Inputs &in = group.in;
  const Sequence sequence = sequence_of(in, group.shared, item, group.items); // read again, so that it takes no registers
  const Scores<F, float, functions_of<C>()> scores(in, sequence, item.b);
  group.together(); // from here on all results are in memory
  const Results<C> results = results_of(group, item, sequence.q0, scores.seqlen_q);
  const auto value = values_of<C>(group.a, sequence, item.b, (i32)group.a.group_divisor.divide(item.h));
  if constexpr (F.part) return add_nonfinite_of_part(item, sequence, scores, dropout, value, results);
  BasicSchedule<i32> tiles = schedule<C>(group.a, narrow(sequence.band), item);
  BasicKeyTile<i32> t;
#pragma unroll 1
  while (tiles.next(t)) {
    // The numbers of V that are not finite were cleared in these tiles. With pages they were also cleared in tiles with missing keys, and
    // these tiles are not known here, so all tiles are taken. Adding a number that was not cleared changes nothing, because its result is
    // already not finite.
    if (C.invariant || F.hides() || F.pages || t.masked || t.end - t.begin < C.tile_k)
      strobe::add_nonfinite<128>(scores, dropout, value, {t.begin, t.end}, {nullptr, 0, 0}, results, (int)threadIdx.x % 128);
  }
}

} // namespace strobe::sm90
