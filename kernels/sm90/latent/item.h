// What a block of threads computes: a tile of queries, and a share of its keys.
#pragma once
#include "../../attention/schedule.h"
#include "../../device/scores.h"
#include "../../device/uneven_shares.h"
#include "arguments.h"
#include "config.h"

namespace strobe::sm90::latent {

struct RowPlace {
  i32 i, h; // query and head; the query of a row that does not exist is kNoQuery
};
enum : i32 { kNoQuery = 1 << 30 };

struct Item {
  i32 b = -1;               // the sequence; negative: there is nothing to do
  i32 kv, h, heads, q;      // the key head; the first query head, and how many there are; the first query
  i32 split, splits, place; // number `split` of the `splits` of the keys; where its results lie among those of all splits
  i32 q_end;
  Sequence sequence;
  BasicBand<i32> band;
  // The keys that some query sees, in this split; and those that all queries see. Tiles begin at `begin`, a multiple of kKeys.
  BasicRange<i32> any, all;
  i32 begin;

  __device__ __forceinline__ bool whole() const { return splits == 1; }
  __device__ __forceinline__ i32 pairs() const { return any.empty() ? 0 : (any.end - begin + 2 * kKeys - 1) / (2 * kKeys); }
  // The first key of a tile of pair n; and whether the pair has its second tile.
  __device__ __forceinline__ i32 key(i32 n, int w) const { return begin + kKeys * (2 * n + w); }
  __device__ __forceinline__ bool has_both(i32 n) const { return key(n, 1) < any.end; }
};

// Blocks that read the same keys are neighbours.
template <Config C> __device__ __forceinline__ Item item_of(const LatentArguments &a) {
  const Inputs &in = a.in;
  Item item;
  u32 x = blockIdx.x;
  const i32 piece = (i32)(x % a.pieces);
  x /= a.pieces;
  const i32 tile = a.tiles - 1 - (i32)(x % a.tiles); // under a causal mask the longest first
  x /= a.tiles;
  item.kv = (i32)(x % in.heads_kv);
  x /= in.heads_kv;
  if constexpr (C.uneven) {
    const UnevenShare share = UnevenShares(in, a.extra_shares, a.round_shares).find((i32)x);
    if (share.batch < 0) return item;
    item.b = share.batch, item.split = share.index, item.splits = share.count, item.place = (i32)x;
  } else {
    item.b = (i32)(x / a.splits), item.split = item.place = (i32)(x % a.splits), item.splits = a.splits;
  }
  if (C.uneven && item.split == 0 && item.kv == 0 && piece == 0 && tile == 0 && threadIdx.x == 0)
    a.share_places[2 * item.b] = item.place, a.share_places[2 * item.b + 1] = item.splits;
  item.sequence = in.sequence<C.features>(item.b);
  item.band = narrow(item.sequence.band);
  item.q = tile * (i32)a.queries.by;
  if (item.q >= item.band.seqlen_q) {
    item.b = -1;
    return item;
  }
  item.h = item.kv * in.group + piece * a.packed, item.heads = min(a.packed, in.group - piece * a.packed);
  item.q_end = min(item.q + (i32)a.queries.by, item.band.seqlen_q);
  const BasicSchedule<i32>::Share share{item.split, item.splits, C.invariant && C.split ? C.chunk() : 0};
  item.any = BasicSchedule<i32>::keys_of_share(item.band.keys_any(item.q, item.q_end), C.pair(), kKeys, share);
  item.all = item.band.keys_all(item.q, item.q_end);
  item.begin = item.any.begin / (C.invariant ? C.pair() : kKeys) * (C.invariant ? C.pair() : kKeys);
  return item;
}

// The query and the head of row r.
__device__ __forceinline__ RowPlace place_of(const LatentArguments &a, const Item &item, i32 r) {
  const i32 n = (i32)a.queries.divide((u32)r), i = item.q + r - n * (i32)a.queries.by;
  return n < item.heads ? RowPlace{i, item.h + n} : RowPlace{kNoQuery, item.h};
}

// Where a row's results lie among those of all splits.
template <Config C> __device__ __forceinline__ i64 partial_row(const LatentArguments &a, const Item &item, i32 h, i32 i) {
  const Inputs &in = a.in;
  if constexpr (C.uneven) return ((i64)item.place * in.heads + h) * in.seqlen_q + i;
  return item.place * in.rows() + in.row_index(item.b, h, item.sequence.q0 + i);
}

} // namespace strobe::sm90::latent
