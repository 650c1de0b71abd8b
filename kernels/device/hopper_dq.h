// Stores dQ = scale * dq_sum, rounded. A warp stores what one warp of the Hopper backward has added up: its part of a piece of a query
// tile.
#pragma once
#include "../attention/dq_sum.h"
#include "epilogue.h"

namespace strobe {

// piece: which 64 columns of the tile, or, if there are only 64 columns, which half of its queries (dq_queries). row: the tile's first row
// in the tensor; `rows` rows exist from there on. sum: the lane's four numbers for each eight queries.
template <class T, i32 kColumns, i32 kTileQ>
__device__ __forceinline__ void store_dq(const BackwardArguments &a, i32 batch, i32 head, i64 row, i32 rows, int piece,
                                         const float4 (&sum)[dq_queries(kColumns, kTileQ) / 8]) {
  constexpr int kN = dq_queries(kColumns, kTileQ);
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
  const i32 column = dq_column(kColumns, piece, warp), first = (kN == kTileQ ? 0 : kN * piece) + lane / 4;
  const float scale = (float)a.in.scale;
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) {
    const float4 x = sum[i];
    const u32 left = transposed(pack<T>(x.x * scale, x.y * scale)), right = transposed(pack<T>(x.z * scale, x.w * scale));
    store_sixteen(a.dq.at<T>(batch, head, row + first + 8 * i, column), first + 8 * i < rows ? a.in.head_dim - column : 0, left, right);
  }
}

// Stores dQ of tile `number` of dq_sum. empty: no thread block has added to the tile, so there is no sum.
template <class T, i32 kColumns, i32 kTileQ>
__device__ __forceinline__ void store_dq(const BackwardArguments &a, i32 batch, i32 head, i64 row, i32 rows, i64 number, int piece,
                                         bool empty) {
  constexpr int kN = dq_queries(kColumns, kTileQ);
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
  if (is_dq_padding(kColumns, piece, warp, a.in.head_dim)) return;
  const float4 *sum = (const float4 *)(a.dq_sum + number * (kTileQ * kColumns) + (piece * 4 + warp) * (16 * kN)) + lane;
  float4 x[kN / 8];
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) x[i] = empty ? float4{0, 0, 0, 0} : __ldcg(sum + 32 * i);
  store_dq<T, kColumns, kTileQ>(a, batch, head, row, rows, piece, x);
}

// Stores dQ from dq_sum in FP32. kAdds: adds to what the tensor holds.
template <bool kAdds, i32 kColumns, i32 kTileQ>
__device__ __forceinline__ void store_dq_unrounded(const BackwardArguments &a, i32 batch, i32 head, i64 row, i32 rows, i64 number,
                                                   int piece, bool empty) {
  constexpr int kN = dq_queries(kColumns, kTileQ);
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
  const i32 column = dq_column(kColumns, piece, warp) + lane / 4, first = (kN == kTileQ ? 0 : kN * piece) + lane % 4 * 2;
  if (is_dq_padding(kColumns, piece, warp, a.in.head_dim)) return;
  const float4 *sum = (const float4 *)(a.dq_sum + number * (kTileQ * kColumns) + (piece * 4 + warp) * (16 * kN)) + lane;
  const float scale = (float)a.in.scale;
#pragma unroll 2
  for (int i = 0; i < kN / 8; ++i) {
    const float4 quad = empty ? float4{0, 0, 0, 0} : __ldcg(sum + 32 * i);
    const float x[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const i32 query = first + 8 * i + k % 2, c = column + k / 2 * 8;
      if (query >= rows || c >= a.in.head_dim) continue;
      float *const to = a.dq.at<float>(batch, head, row + query, c);
      *to = kAdds ? *to + x[k] * scale : x[k] * scale;
    }
  }
}

} // namespace strobe
