// What the Hopper backward does to each row before and after: LSE and D, room for dQ, whose turn it is; dQ's conversion.
#pragma once
#include "../device/hopper_dq.h"
#include "../sm90/backward/config.h"
#include "../tile/exchange.h"
#include "rows.h"

namespace strobe::passes {

// The first tiles' dq_sum is written last, and is in the L2 cache yet when Backward begins with them; at the end the other way round.
__device__ __forceinline__ u32 last_first() { return gridDim.x - 1 - blockIdx.x; }

// LSE and D = rowsum(dO * O) - dLSE, a tile of queries side by side; the tile's part of dq_sum, and its turns, become 0.
template <RowsConfig C> struct BackwardRows {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 4, kLanes = C.head_dim > 64 ? 16 : 8; // of a row

  static __device__ __forceinline__ void run(const Arguments &arguments) {
    const BackwardArguments &a = arguments;
    const Inputs &in = a.in;
    const RowTile<C> tile(in, last_first());
    if (a.turns && blockIdx.x == 0 && threadIdx.x == 0) a.turns[0] = 0;
    if (tile.rows == 0) return;
    // First what waits for nothing.
    if (a.turns && threadIdx.x < 2) a.turns[1 + 2 * tile.number + threadIdx.x] = 0;
    if (a.dq_sum && !arguments.first_stores) {
      float4 *sum = (float4 *)(a.dq_sum + tile.number * (C.tile_q * C.head_dim));
      for (int i = (int)threadIdx.x; i < C.tile_q * C.head_dim / 4; i += kThreads) sum[i] = float4{0, 0, 0, 0};
    }
    float *rows = arguments.rows + tile.number * ((in.bias ? 3 : 2) * C.tile_q);
    constexpr int kRows = kThreads / kLanes, kSteps = C.tile_q / kRows; // at a time; unrolled, so that all loads are under way at once
    static_assert(C.tile_q % kRows == 0);
    const int first = (int)threadIdx.x / kLanes, lane = (int)threadIdx.x % kLanes;
    float D[kSteps] = {}, zero[kSteps] = {}, zero_q[kSteps] = {}; // zero: unless dO, or Q, is no number
    const T *out = a.out.at<const T>(tile.batch, tile.head, tile.row + first, 0);
    const T *dout = a.dout.at<const T>(tile.batch, tile.head, tile.row + first, 0);
#pragma unroll 1
    for (i32 c = 8 * lane; c < in.head_dim_v; c += 8 * kLanes) {
      uint4 x[kSteps] = {}, y[kSteps] = {};
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        const int i = first + n * kRows;
        if (i >= tile.rows) continue;
        x[n] = *(const uint4 *)(out + n * kRows * a.out.stride[2] + c);
        y[n] = *(const uint4 *)(dout + n * kRows * a.dout.stride[2] + c);
      }
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        D[n] += dot(x[n], y[n]);
        zero[n] += dot(uint4{}, y[n]);
      }
    }
    if (in.sinks) { // then a row that sees nothing has a finite LSE, whatever Q is
      const T *q = in.q.at<const T>(tile.batch, tile.head, tile.row + first, 0);
#pragma unroll 1
      for (i32 c = 8 * lane; c < in.head_dim; c += 8 * kLanes) {
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          if (first + n * kRows < tile.rows) zero_q[n] += dot(uint4{}, *(const uint4 *)(q + n * kRows * in.q.stride[2] + c));
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      const int i = first + n * kRows;
#pragma unroll
      for (int m = kLanes / 2; m > 0; m /= 2) {
        D[n] += __shfl_xor_sync(0xFFFFFFFFu, D[n], m);
        zero[n] += __shfl_xor_sync(0xFFFFFFFFu, zero[n], m);
        if (in.sinks) zero_q[n] += __shfl_xor_sync(0xFFFFFFFFu, zero_q[n], m);
      }
      if (lane == 0) write(a, tile, i, D[n], zero[n] == 0, zero_q[n] == 0, rows);
    }
  }

private:
  static __device__ __forceinline__ float dot(const uint4 &x, const uint4 &y) {
    const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(tile::unpacked<T>(a[i / 2], i % 2), tile::unpacked<T>(b[i / 2], i % 2), sum);
    return sum;
  }
  static __device__ __forceinline__ void write(const BackwardArguments &a, const RowTile<C> &tile, int i, float D, bool finite,
                                               bool q_finite, float *rows) {
    const float infinity = -minus_infinity<float>();
    float lse = -infinity;
    float lacks = 0;
    if (i < tile.rows) {
      lse = *a.lse.at<const float>(tile.batch, tile.head, tile.row + i, 0);
      float *delta = (float *)a.delta + tile.index + i, *lost = delta + a.in.rows(); // what LSE lacks: kernels/device/settle_row.h
      if (a.in.bias) {                                                               // known by now
        D = *delta, lacks = *lost;
      } else {
        if (a.dlse) D -= *a.dlse.at<const float>(tile.batch, tile.head, tile.row + i, 0);
        if (a.delta) *delta = D, *lost = 0;
      }
    }
    if (!q_finite && fabsf(lse) < infinity) lse = -infinity; // it sees the sink alone: a score that it sees would be in LSE
    // A row whose dO or LSE is no number: neither is its P. D alone (of a row that sees a V which is none) leaves dV its P.
    rows[i] = lse == -infinity ? lse : finite ? -lse * (a.in.bias ? 1.0f : kLog2e<float>) : __int_as_float(0x7FC00000);
    if (a.in.bias) rows[i + C.tile_q] = -lacks * kLog2e<float>;
    rows[i + (a.in.bias ? 2 : 1) * C.tile_q] = finite && fabsf(lse) < infinity ? D : 0;
  }
};

// dQ = scale * dq_sum, rounded. A warp takes what warps of Backward have added up.
template <RowsConfig C> struct BackwardDq {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 2;
  static constexpr int kN = dq_queries(C.head_dim, C.tile_q);
  static_assert(kThreads == 256);

  static __device__ __forceinline__ void run(const Arguments &arguments) {
    const BackwardArguments &a = arguments;
    const RowTile<C> tile(a.in, last_first());
    if (tile.rows == 0) return; // of a sequence shorter than the longest: dq_sum has no such tile
#pragma unroll 1
    for (int part = (int)threadIdx.x / 128; part < C.tile_q / kN * (C.head_dim / 64); part += 2)
      store_dq<T, C.head_dim, C.tile_q>(a, tile.batch, tile.head, tile.row, tile.rows, tile.number, part,
                                        arguments.first_stores && a.turns[1 + 2 * tile.number + part] == 0);
  }
};

} // namespace strobe::passes
