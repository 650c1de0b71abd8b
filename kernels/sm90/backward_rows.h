// What the Hopper backward does to each row before and after: LSE and D, room for dQ, whose turn it is; dQ's conversion.
#pragma once
#include "../mma/rows.h"
#include "../ptx/mma.h"
#include "backward_config.h"
#include "store.h"

namespace strobe::sm90 {

using mma::RowsConfig;
using mma::RowTile;

// LSE and D = rowsum(dO * O) - dLSE, a tile of queries side by side; the tile's part of dq_sum, and its turns, become 0.
template <RowsConfig C> struct BackwardRows {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 2, kLanes = 8; // of a row

  static __device__ __forceinline__ void run(const Arguments &arguments) {
    const BackwardArguments &a = arguments.a;
    const Inputs &in = a.in;
    const RowTile<C> tile(in);
    if (a.turns && blockIdx.x == 0 && threadIdx.x == 0) a.turns[0] = 0;
    if (tile.rows == 0) return;
    if (a.turns && threadIdx.x < 2) a.turns[1 + 2 * tile.number + threadIdx.x] = 0;
    if (a.dq_sum) {
      float4 *sum = (float4 *)(a.dq_sum + tile.number * (C.tile_q * C.head_dim));
      for (int i = (int)threadIdx.x; i < C.tile_q * C.head_dim / 4; i += kThreads) sum[i] = float4{0, 0, 0, 0};
    }
    float *rows = arguments.rows + tile.number * (2 * C.tile_q);
    const int lane = (int)threadIdx.x % kLanes;
    for (int i = (int)threadIdx.x / kLanes; i < C.tile_q; i += kThreads / kLanes) {
      float lse = minus_infinity<float>(), D = 0;
      if (i < tile.rows) {
        const T *out = a.out.at<const T>(tile.batch, tile.head, tile.row + i, 0),
                *dout = a.dout.at<const T>(tile.batch, tile.head, tile.row + i, 0);
        lse = *a.lse.at<const float>(tile.batch, tile.head, tile.row + i, 0);
        for (i32 c = 8 * lane; c < in.head_dim_v; c += 8 * kLanes) {
          T x[8], y[8];
          *(uint4 *)x = *(const uint4 *)(out + c);
          *(uint4 *)y = *(const uint4 *)(dout + c);
#pragma unroll
          for (int e = 0; e < 8; ++e) D = fmaf(to_float(x[e]), to_float(y[e]), D);
        }
      }
#pragma unroll
      for (int n = kLanes / 2; n > 0; n /= 2) D += __shfl_xor_sync(0xFFFFFFFFu, D, n);
      if (lane) continue;
      if (i < tile.rows && a.dlse) D -= *a.dlse.at<const float>(tile.batch, tile.head, tile.row + i, 0);
      if (i < tile.rows && a.delta) {
        float *delta = (float *)a.delta + tile.index + i;
        delta[0] = D, delta[in.rows()] = 0; // and what LSE lacks: kernels/simt/settle.h
      }
      // A row that holds something that is no number: so is its P.
      const float x = lse * -1.4426950408889634f, limit = -minus_infinity<float>();
      rows[i] = lse == -limit ? lse : fabsf(D) < limit ? x : D - D;
      rows[C.tile_q + i] = fabsf(x) < limit && fabsf(D) < limit ? D : 0;
    }
  }
};

// dQ = scale * dq_sum, rounded. A warp takes what a warp of Backward has added up.
template <RowsConfig C> struct BackwardDq {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 2;
  static constexpr int kN = dq_queries(C.head_dim, C.tile_q);
  static_assert(kThreads == 256, "the warps that compute in Backward");

  static __device__ __forceinline__ void run(const Arguments &arguments) {
    const BackwardArguments &a = arguments.a;
    const RowTile<C> tile(a.in);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4, w = (int)threadIdx.x / 128;
    const i32 column = (kN == C.tile_q ? 64 * w : 0) + 16 * warp, first = (kN == C.tile_q ? 0 : kN * w) + lane / 4;
    const float scale = (float)a.in.scale;
    const float4 *sum = (const float4 *)(a.dq_sum + tile.number * (C.tile_q * C.head_dim) + (w * 4 + warp) * (16 * kN)) + lane;
#pragma unroll 4
    for (int i = 0; i < kN; i += 8) {
      const float4 x = sum[4 * i];
      const u32 left = transposed(pack<T>(x.x * scale, x.y * scale)), right = transposed(pack<T>(x.z * scale, x.w * scale));
      store_sixteen(a.dq.at<T>(tile.batch, tile.head, tile.row + first + i, column), left, right,
                    [&](int c) { return first + i < tile.rows && column + c < a.in.head_dim; });
    }
  }
};

} // namespace strobe::sm90
