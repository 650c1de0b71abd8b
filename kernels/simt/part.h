// Where the rows of a kernel's tiles lie, in whole calls and in parts of larger problems.
#pragma once
#include "kept.h"
#include "tile.h"
#include "walk.h"

namespace strobe::simt {

template <Config C> using TilesOfKeys = typename Either<C.features.part != 0, RangesOfKeys, KeyTiles>::type;
template <Config C>
using TilesOfQueries = typename Either<C.features.part != 0, RangesOfQueries<C.features.blocks != 0, C.tile_q>,
                                       DescendingQueries<C.features.blocks != 0, C.tile_q>>::type;

// The scores of a tile's queries. In a part, mask and bias are read at the part's rows.
template <Config C, class T> __device__ __forceinline__ Scores<C.features, T> scores_of(const Inputs &in, const Sequence &s, i64 b) {
  Scores<C.features, T> scores(in, s, b);
  if constexpr (C.features.part) scores.row_shift = (i32)(s.q0 - in.held(b).q0);
  return scores;
}

// The score of a row and a key. open: the function of the mask has to be asked.
template <Config C, class T>
__device__ __forceinline__ T score_of(const Scores<C.features, T> &scores, T raw, const typename Scores<C.features, T>::Row &row, i32 j,
                                      bool by_position, i32 limit, bool open) {
  if constexpr (C.features.blocks != kFullKnown) return scores.score(raw, row, j, by_position, limit);
  const typename Scores<C.features, T>::InMemory given{scores, row, j};
  return scores.score(raw, row, j, T(scores.distance(row.i, j)), given, by_position, limit, open);
}
// The same with d score / d (scaled q.k).
template <Config C, class T>
__device__ __forceinline__ T score_of(const Scores<C.features, T> &scores, T raw, const typename Scores<C.features, T>::Row &row, i32 j,
                                      bool by_position, i32 limit, bool open, T &slope) {
  if constexpr (C.features.blocks != kFullKnown) return scores.score(raw, row, j, by_position, limit, slope);
  return scores.score(raw, row, j, typename Scores<C.features, T>::InMemory{scores, row, j}, by_position, limit, slope, open);
}

// K or V of a key head of a sequence.
template <Config C, class E, class Source>
__device__ __forceinline__ auto keys_of(const Operand &x, const Inputs &in, const Sequence &s, i64 b, i64 head, i32 columns) {
  if constexpr (C.features.pages)
    return PagedRows<E>(x, in.pages.of(b), head, (i32)s.band.seqlen_k, columns);
  else
    return Source(Keys<E>(x, s, b, head, columns), (i32)s.band.seqlen_k);
}

// The rows of K from the arguments of a forward. The keys may be quantised.
template <Config C, class E, class Source, class Arguments>
__device__ __forceinline__ auto rows_of_k(const Arguments &a, const Sequence &s, i64 b, i64 head) {
  constexpr Features F = C.features;
  if constexpr (F.quant)
    return QuantisedRows<F, F.by_column != 0>(k_of_call<E, F>(a, s, b, head), (i32)s.band.seqlen_k);
  else
    return keys_of<C, E, Source>(a.in.k, a.in, s, b, head, a.in.head_dim);
}
template <Config C, class E, class Source, class Arguments>
__device__ __forceinline__ auto rows_of_v(const Arguments &a, const Sequence &s, i64 b, i64 head) {
  constexpr Features F = C.features;
  if constexpr (F.quant)
    return QuantisedRows<F, false>(v_of_call<E, F>(a, s, b, head), (i32)s.band.seqlen_k);
  else
    return keys_of<C, E, Source>(a.in.v, a.in, s, b, head, a.in.head_dim_v);
}

// The keys that some of the queries [q0, q1) see.
template <Config C> __device__ __forceinline__ PartKeys part_keys(const Inputs &in, const Sequence &s, i32 b, i32 h, i32 q0, i32 q1) {
  constexpr Features F = C.features;
  const BlockRow row = F.blocks ? in.blocks.row(b, h, q0 / in.blocks.row_tokens) : BlockRow{};
  return {s.band, q0, q1, C.tile_k, F.part == kAnywhere ? 1 : 16, row, held_keys(in, b)};
}
// The sequence as a query tile sees it. s: the sequence as the key tile sees it.
__device__ __forceinline__ const Sequence &sequence_of(const Sequence &s, const Tile &) { return s; }
__device__ __forceinline__ Sequence sequence_of(const Sequence &s, const ShiftedTile &tile) {
  Sequence own = s;
  own.q0 += tile.shift, own.band.seqlen_q = tile.end;
  return own;
}

// Rows of K or V, Q or dO, numbered as the tile numbers its rows.
template <class Source> __device__ __forceinline__ const Source &rows_of(const Source &all, const Tile &) { return all; }
template <class Source> __device__ __forceinline__ Source rows_of(const Source &all, const ShiftedTile &tile) {
  return all.shifted(tile.shift, tile.end);
}

} // namespace strobe::simt
