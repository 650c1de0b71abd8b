// A thread block recomputes P and dS of one tile of scores, in the arithmetic of the family's backward. The passes that make dbias and that
// settle rows add them up.
#pragma once
#include "../tile/copy.h"
#include "../tile/multiply.h"
#include "../tile/tf32_multiply.h"
#include "key_major_dropout.h"
#include "keys.h"
#include "probabilities.h"
#include "tile_gradient_config.h"

namespace strobe {

template <TileConfig C> class TileGradient {
protected:
  static constexpr bool kTf32 = C.dtype == kF32;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kTileQ = C.tile_q, kTileK = C.tile_k, kThreads = C.threads();
  static constexpr u32 kK = 0, kV = C.k_bytes(), kQ = kV + C.v_bytes(), kDo = kQ + C.q_bytes();

public:
  static constexpr int kKeys = kTileK / C.key_warps / 16, kQueries = kTileQ / C.query_warps / 16; // a warp's 16x16 blocks
  using Tile = tile::Accumulator[kKeys][kQueries];                                                // rows are keys
  struct Place {                                                                                  // where a tile of scores lies
    i32 batch, head, q0, k0;
  };

  static constexpr Functions kFunctions = kTf32 ? Functions::full : Functions::half;

  const BackwardArguments &a;
  const Inputs &in;
  int thread, key_warp, query_warp;

  __device__ __forceinline__ TileGradient(const BackwardArguments &a, unsigned char *memory)
      : a(a), in(a.in), thread((int)threadIdx.x), key_warp(thread / 32 % C.key_warps), query_warp(thread / 32 / C.key_warps),
        shared_(shared_address(memory)) {}

  // Computes P, negated where dropout drops it, and dS, which is 0 where P is. Returns whether some query sees some key of the tile; if
  // not, P and dS are not written.
  __device__ __forceinline__ bool compute(Tile &P, Tile &dS, const Place &place) const {
    const Sequence sequence = in.sequence<F>(place.batch);
    if (!sees(sequence, place)) return false;
    const Band &band = sequence.band;
    const i32 q1 = (i32)min((i64)place.q0 + kTileQ, band.seqlen_q), k1 = (i32)min((i64)place.k0 + kTileK, band.seqlen_k);

    __syncthreads(); // all threads have read the previous tile
    load<kTileK, kD>(kK, k_of<T>(in, sequence, place.batch, place.head / in.group).rows(place.k0, k1));
    load<kTileK, kDv>(kV, v_of<T>(in, sequence, place.batch, place.head / in.group).rows(place.k0, k1));
    load<kTileQ, kD>(kQ, queries(in.q, place, sequence, q1, in.head_dim));
    load<kTileQ, kDv>(kDo, queries(a.dout, place, sequence, q1, in.head_dim_v));
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    const Scores<F, float, kFunctions> scores(in, sequence, place.batch);
    const i32 i = place.q0 + query_warp * kQueries * 16, j = place.k0 + key_warp * kKeys * 16;
    fill(P, 0), multiply<kD, true>(P, kK, kQ);
    const auto lse = [&](int n) { return RowLse{*this, place, sequence, i + 16 * n, q1}; };
    if (masked(sequence, place))
      probabilities<F, true, Slope::none, true>(P, P, scores, place.head, i, j, k1, lse);
    else
      probabilities<F, false, Slope::none, true>(P, P, scores, place.head, i, j, k1, lse);
    const KeyMajorDropout<F> dropout{Dropout<F>(in)};
    if constexpr (F.dropout) dropout.mark(P, i, j, place.head, place.batch);
    fill(dS, 0), multiply<kDv, false>(dS, kV, kDo);
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float D = *delta(place, sequence, i + 16 * n + tile::lane_column(k / 2, k % 2), q1);
#pragma unroll
        for (int m = 0; m < 2 * kKeys; ++m) {
          float &x = dS[m / 2][n].x[k / 2][2 * (m % 2) + k % 2];
          x = differentiated(x, P[m / 2][n].x[k / 2][2 * (m % 2) + k % 2], D, dropout);
        }
      }
    }
    return true;
  }

protected:
  u32 shared_;

  // Whether some query of a tile sees some key.
  __device__ __forceinline__ bool sees(const Sequence &sequence, const Place &place) const {
    const Band &band = sequence.band;
    const i32 q1 = (i32)min((i64)place.q0 + kTileQ, band.seqlen_q), k1 = (i32)min((i64)place.k0 + kTileK, band.seqlen_k);
    return q1 > place.q0 && k1 > place.k0 && !intersect(band.keys_any(place.q0, q1), {place.k0, k1}).empty() && kept(place);
  }
  // Whether some query does not see some key by position.
  __device__ __forceinline__ bool masked(const Sequence &sequence, const Place &place) const {
    const Range all = sequence.band.keys_all(place.q0, (i32)min((i64)place.q0 + kTileQ, sequence.band.seqlen_q));
    return place.k0 < all.begin || place.k0 + kTileK > all.end;
  }

  // dS of an element whose P is negative if dropout drops it.
  static __device__ __forceinline__ float differentiated(float dP, float P, float D, const KeyMajorDropout<F> &dropout) {
    if constexpr (F.dropout) dP = __float_as_uint(P) >> 31 ? 0.0f : dP * dropout.dropout.factor(), P = fabsf(P);
    return P == 0 ? 0.0f : P * (dP - D); // a hidden element may be NaN
  }

  // LSE and D of the queries from `first` on, loaded where they are used: registers are scarce.
  struct RowLse {
    const TileGradient &gradient;
    const Place &place;
    const Sequence &sequence;
    i32 first, q1;
    __device__ __forceinline__ float lse(int c, int e) const { // +inf for rows that do not exist or see no key
      const i32 row = first + tile::lane_column(c, e);
      const float x =
          row < q1 ? *gradient.a.lse.template at<const float>(place.batch, place.head, sequence.q0 + row, 0) : minus_infinity<float>();
      return x == minus_infinity<float>() ? -x : x;
    }
    __device__ __forceinline__ float correction(int c, int e) const {
      return gradient.delta(place, sequence, first + tile::lane_column(c, e), q1)[gradient.in.rows()] * kLog2e<float>;
    }
  };

  __device__ __forceinline__ tile::Matrix<const T> queries(const Operand &x, const Place &place, const Sequence &sequence, i32 q1,
                                                           i32 columns) const {
    return {x.at<const T>(place.batch, place.head, sequence.q0 + place.q0, 0), x.stride[2], x.stride[3], q1 - place.q0, columns};
  }
  template <int kRows, int kColumns> __device__ __forceinline__ void load(u32 target, const tile::Matrix<const T> &m) const {
    if constexpr (kTf32)
      tile::tf32::load<kRows, kColumns, kThreads, C.aligned != 0>(shared_ + target, m, thread);
    else
      tile::load<kRows, kColumns, kThreads, C.aligned != 0>(shared_ + target, tile::StridedMatrix<const T>{m}, thread);
  }
  static __device__ __forceinline__ void fill(Tile &x, float value) {
#pragma unroll
    for (int n = 0; n < 8 * kKeys * kQueries; ++n) x[n / 8 / kQueries][n / 8 % kQueries].x[n / 4 % 2][n % 4] = value;
  }
  // x += this warp's rows of the tile at `keys`, times the transpose of its rows of the tile at `queries`.
  template <int kInner, bool kScores> __device__ __forceinline__ void multiply(Tile &x, u32 keys, u32 queries) const {
    constexpr u32 kRow = element_bytes(C.dtype) * kInner;
    keys += shared_ + key_warp * kKeys * 16 * kRow, queries += shared_ + query_warp * kQueries * 16 * kRow;
    if constexpr (kTf32)
      tile::tf32::multiply_rows<kInner, C.products, kScores ? tile::tf32::Sum::of_scores_transposed : tile::tf32::Sum::of_32>(x, keys,
                                                                                                                              queries);
    else
      tile::multiply<T, kInner, false>(x, keys, queries);
  }
  __device__ __forceinline__ bool kept(const Place &place) const { // a tile lies within one mask block
    if constexpr (F.blocks) return in.blocks.row(place.batch, place.head, place.q0 / in.blocks.row_tokens).keeps(place.k0);
    return true;
  }
  // The address of D of a row, clamped to the last one before q1. The correction of its LSE lies in.rows() numbers further.
  __device__ __forceinline__ const float *delta(const Place &place, const Sequence &sequence, i32 row, i32 q1) const {
    return (const float *)a.delta + in.row_index(place.batch, place.head, sequence.q0 + min(row, q1 - 1));
  }
};

} // namespace strobe
