// Turns a warp's tile of q.k into scores; hidden elements become -inf.
#pragma once
#include "../tile/registers.h"
#include "scores.h"

namespace strobe {

// Whether a key of the tile is hidden from some query by position, or the tile has fewer than kTileK keys.
template <int kTileK, class KeyTile> __device__ __forceinline__ bool hides_by_position(const KeyTile &tile) {
  return tile.masked || tile.end - tile.begin < kTileK;
}

// row_of(n) returns the Scores::Row of the lane's row n. kAsks: the function of the mask may hide some key of the tile.
template <bool kByPosition, bool kAsks, Features F, Functions kFunctions, class KeyTile, class RowOf, int kM, int kN>
__device__ __forceinline__ void score_elements(tile::Accumulator (&S)[kM][kN], const Scores<F, float, kFunctions> &scores,
                                               const KeyTile &tile, const RowOf &row_of) {
  const i32 begin = (i32)tile.begin, end = (i32)tile.end;
#pragma unroll
  for (int row = 0; row < 2 * kM; ++row) {
    const auto query = row_of(row);
#pragma unroll
    for (int k = 0; k < 4 * kN; ++k) {
      float &s = tile::row_element(S, row, k);
      const i32 key = begin + 16 * (k / 4) + tile::lane_column(k / 2 % 2, k % 2);
      if constexpr (kAsks)
        s = scores.score(s, query, key, kByPosition, end);
      else
        s = scores.score(s, query, key, (float)scores.distance(query.i, key),
                         typename Scores<F, float, kFunctions>::InMemory{scores, query, key}, kByPosition, end, false);
    }
  }
}
template <bool kAsks, Features F, Functions kFunctions, class KeyTile, class RowOf, int kM, int kN>
__device__ __forceinline__ void score_tile(tile::Accumulator (&S)[kM][kN], const Scores<F, float, kFunctions> &scores, const KeyTile &tile,
                                           const RowOf &row_of) {
  if (hides_by_position<16 * kN>(tile))
    score_elements<true, kAsks>(S, scores, tile, row_of);
  else if constexpr (F.by_element())
    score_elements<false, kAsks>(S, scores, tile, row_of);
}
template <Features F, Functions kFunctions, class KeyTile, class RowOf, int kM, int kN>
__device__ __forceinline__ void score_tile(tile::Accumulator (&S)[kM][kN], const Scores<F, float, kFunctions> &scores, const KeyTile &tile,
                                           const RowOf &row_of) {
  if constexpr (F.blocks == kFullKnown) {
    if (!tile.open) return score_tile<false>(S, scores, tile, row_of);
  }
  score_tile<true>(S, scores, tile, row_of);
}

// Hides the tile's missing keys (keys.h).
template <class Keys, class KeyTile, int kM, int kN>
__device__ __forceinline__ void hide_lacking(tile::Accumulator (&S)[kM][kN], const Keys &keys, const KeyTile &tile) {
#pragma unroll
  for (int k = 0; k < 4 * kN; ++k) {
    const i32 j = (i32)tile.begin + 16 * (k / 4) + tile::lane_column(k / 2 % 2, k % 2);
    if (j >= (i32)tile.end || !lacks(keys, j)) continue;
#pragma unroll
    for (int row = 0; row < 2 * kM; ++row) tile::row_element(S, row, k) = minus_infinity<float>();
  }
}

} // namespace strobe
