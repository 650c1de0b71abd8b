// The products of a warp's tile with quantised K and V. The stored numbers are multiplied without their scales. Afterwards the scale of a
// row of K multiplies a column of S; before the product the scale of a row of V multiplies a column of P.
#pragma once
#include "../../device/keys.h"
#include "../../tile/quantised.h"

namespace strobe::mma {

// The scales of a warp's tile of at most 32 keys, one key per lane, read one tile ahead.
template <Features F> struct TileScales {
  template <class K, class V, class Places> __device__ __forceinline__ TileScales(const K &, const V &, const Schedule &, const Places &) {}
};
template <Features F>
  requires(F.quant != 0)
struct TileScales<F> {
  float k = 0, v = 0;

  // tiles: the schedule, from the first tile on.
  template <class K, class V, class Places>
  __device__ __forceinline__ TileScales(const K &keys, const V &values, const Schedule &tiles, const Places &places) {
    read(keys, values, tiles, places);
  }
  // Moves to the scales of the next tile, and begins to read those of the tile after it, which is the first of `tiles`. Returns whether
  // this lane's scale of V is not finite. Such a scale becomes 0 here, and its row of V must be added separately.
  template <class K, class V, class Places>
  __device__ __forceinline__ bool next(const K &keys, const V &values, const Schedule &tiles, const Places &places) {
    k = keys.number(next_k_), v = values.number(next_v_);
    const bool nonfinite = v - v != 0;
    if (nonfinite) v = 0;
    read(keys, values, tiles, places);
    return nonfinite;
  }
  // The scale of key i of the tile.
  __device__ __forceinline__ static float of(float scales, int i) { return __shfl_sync(0xFFFFFFFFu, scales, i); }

private:
  StoredScale next_k_, next_v_;

  template <class K, class V, class Places>
  __device__ __forceinline__ void read(const K &keys, const V &values, Schedule tiles, const Places &places) {
    KeyTile tile;
    next_k_ = {}, next_v_ = {};
    if (!tiles.next(tile)) return;
    const i32 j = (i32)tile.begin + tile::lane_id();
    if (j >= (i32)tile.end) return;
    if constexpr (F.pages)
      next_k_ = keys.stored_scale(places.scale(keys)), next_v_ = values.stored_scale(places.scale(values));
    else
      next_k_ = keys.stored_scale(keys.scales_of(j)), next_v_ = values.stored_scale(values.scales_of(j));
  }
};

// Converts Q from BF16 to FP16, if K is multiplied as FP16. Each row of Q is divided by a power of two that brings its largest number to
// 2^15. FP16 has more digits than BF16, so only numbers below 2^-39 of the row's largest number are lost.
template <class T, i32 kStored, int kM> struct QueryScales {
  template <int kSteps> __device__ __forceinline__ explicit QueryScales(tile::Left (&)[kM][kSteps]) {}
  __device__ __forceinline__ static float unscaled(int, float s) { return s; }
};
template <i32 kStored, int kM>
  requires tile::kIsHalf<typename tile::KeyFactor<bf16, kStored>::type>
struct QueryScales<bf16, kStored, kM> {
  template <int kSteps> __device__ __forceinline__ explicit QueryScales(tile::Left (&Q)[kM][kSteps]) {
#pragma unroll
    for (int row = 0; row < 2 * kM; ++row) {
      u32 largest = 0; // as integers: magnitudes of BF16 have the same order
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const u32 pair = Q[row / 2][i / 2].x[row % 2 + i % 2 * 2];
        largest = max(largest, max(pair >> 16 & 0x7FFF, pair & 0x7FFF));
      }
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
      const i32 exponent = (i32)(largest >> 7) - 127 - 15; // exponent of the row's unit
      const i32 unit = exponent < -126 ? -126 : exponent;
      unit_[row] = __int_as_float((unit + 127) << 23);
      const float inverse = __int_as_float((127 - unit) << 23);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        u32 &pair = Q[row / 2][i / 2].x[row % 2 + i % 2 * 2];
        pair = pack<f16>(__uint_as_float(pair << 16) * inverse, __uint_as_float(pair & 0xFFFF0000u) * inverse);
      }
    }
  }
  // Undoes, in a score, the division of this row of Q by its power of two.
  __device__ __forceinline__ float unscaled(int row, float s) const { return s * unit_[row]; }

private:
  float unit_[2 * kM];
};

// S = Q K^T for 16 kN keys.
template <class T, i32 kStored, int kD, int kM, int kN, int kSteps, class Scales>
__device__ __forceinline__ void multiply_stored(tile::Accumulator (&S)[kM][kN], const tile::Left (&Q)[kM][kSteps], u32 k,
                                                const QueryScales<T, kStored, kM> &row_scales, const Scales &scales, u32 zero) {
  using Rows = tile::StoredRows<kStored, kD>;
  constexpr bool kFindsNan = kStored == kE4M3 && !tile::kConverted<kStored>;
  constexpr int kPairs = tile::columns_of_word(kStored) / 2; // two per step
  const Rows rows(k);
#pragma unroll
  for (int half = 0; half < 2 * kN; ++half) { // 8 keys
    u32 words[Rows::kWords], nan = 0;
    rows.load(words, 8 * half);
#pragma unroll
    for (int w = 0; w < Rows::kWords; ++w) {
      u32 pairs[kPairs];
      tile::pairs_of_key<T, kStored>(words[w], pairs, zero);
      if constexpr (kFindsNan) nan |= tile::nan_bits<kStored>(words[w]);
#pragma unroll
      for (int p = 0; p < kPairs; p += 2)
#pragma unroll
        for (int m = 0; m < kM; ++m)
          mma_m16n8k16<typename tile::KeyFactor<T, kStored>::type>(S[m][half / 2].x[half % 2], Q[m][w * (kPairs / 2) + p / 2].x, pairs[p],
                                                                   pairs[p + 1]);
    }
    const u32 keys = kFindsNan ? __ballot_sync(0xFFFFFFFFu, tile::has_nan(nan)) : 0; // for each key four bits: the lanes that found NaN
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = tile::lane_column(0, e); // number within the eight keys
      float scale = scales.of(scales.k, 8 * half + key);
      if (kFindsNan && keys >> 4 * key & 15) scale = __int_as_float(0x7FC00000);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float &s = S[m][half / 2].x[half % 2][2 * r + e];
          s = row_scales.unscaled(2 * m + r, s) * scale;
        }
    }
  }
}

// O += P V; multiplies P by V's scales first. The product is one of BF16 numbers: a scale may have any exponent, and BF16 holds every
// stored value. For FP16 results BF16's fraction is too short, so P times a scale is split into two BF16 numbers. FP8's NaN enters the
// product as a number, and so does its infinity; the function returns whether the tile of V holds one, which the caller then adds.
template <class T, i32 kStored, int kDv, int kM, int kN, int kSums, class Scales>
__device__ __forceinline__ bool add_stored(tile::Accumulator (&O)[kM][kSums], tile::Accumulator (&P)[kM][kN], u32 v, const Scales &scales,
                                           u32 zero) {
  constexpr int kTerms = tile::kIsHalf<T> ? 2 : 1;
  constexpr int kPairs = tile::columns_of_word(kStored) / 2, kUnits = kStored == kInt4 ? kDv / 4 : kDv / 2; // 16-bit units per row
  tile::Left factors[kTerms][kM][kN];
#pragma unroll
  for (int k = 0; k < 4 * kN; ++k) {
    const float scale = scales.of(scales.v, 16 * (k / 4) + tile::lane_column(k / 2 % 2, k % 2));
#pragma unroll
    for (int row = 0; row < 2 * kM; ++row) tile::row_element(P, row, k) *= scale;
  }
#pragma unroll
  for (int term = 0; term < kTerms; ++term)
#pragma unroll
    for (int i = 0; i < kM * kN; ++i) {
      tile::Accumulator &rest = P[i / kN][i % kN];
      factors[term][i / kN][i % kN] = tile::rounded<bf16>(rest);
#pragma unroll
      for (int x = 0; x < 8; ++x)
        if (term + 1 < kTerms) rest.x[x / 4][x % 4] -= to_float(Convert<bf16>::from(rest.x[x / 4][x % 4]));
    }

  const tile::Blocks<tile::Right, kUnits, true> V(v);
  u32 nan = 0;
#pragma unroll
  for (int c = 0; c < kUnits / 16; ++c) {
    constexpr int kEach = kPairs; // accumulators for 16 units; half of them for the words of each half
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const tile::Right stored = V.load(16 * n, 16 * c);
#pragma unroll
      for (int h = 0; h < 2; ++h) {    // halves of the units
        u32 low[kPairs], high[kPairs]; // keys 0 to 7; keys 8 to 15
        tile::pairs_of<bf16, kStored>(stored.x[2 * h], low, zero), tile::pairs_of<bf16, kStored>(stored.x[2 * h + 1], high, zero);
        if constexpr (tile::kHasNan<kStored>)
          nan |= tile::nan_bits<kStored>(stored.x[2 * h]) | tile::nan_bits<kStored>(stored.x[2 * h + 1]);
#pragma unroll
        for (int p = 0; p < kPairs; ++p)
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int term = 0; term < kTerms; ++term)
              mma_m16n8k16<bf16>(O[m][kEach * c + h * (kPairs / 2) + p / 2].x[p % 2], factors[term][m][n].x, low[p], high[p]);
      }
    }
  }
  return tile::has_nan(nan);
}

} // namespace strobe::mma
