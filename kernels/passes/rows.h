// What the backward does to each row before and after: D, room for dQ, dQ's conversion.
#pragma once
#include "../attention/dq_sum.h"
#include "../ptx/barrier.h"
#include "../ptx/math.h"
#include "rows_config.h"

namespace strobe::passes {

// A block's tile of queries: of one head of one sequence.
template <RowsConfig C> struct RowTile {
  i32 batch, head, rows;
  i64 row, index, number; // of its first row in the tensors and in contiguous scratch; of the tile

  __device__ __forceinline__ explicit RowTile(const Inputs &in, u32 block = blockIdx.x) {
    u32 tiles = (u32)div_up(in.seqlen_q, C.tile_q), pair = block / tiles, tile = block % tiles;
    batch = (i32)(pair / in.heads), head = (i32)(pair % in.heads);
    Sequence s = in.sequence(batch);
    i64 begin = (i64)tile * C.tile_q;
    rows = (i32)max(0ll, min(s.band.seqlen_q - begin, (i64)C.tile_q));
    row = s.q0 + begin, index = in.row_index(batch, head, row), number = first_query_tile(in, batch, head, C.tile_q) + tile;
  }
};

// D = rowsum(dO * O) - dLSE; the tile's part of dq_sum becomes 0.
template <RowsConfig C> struct Delta {
  using Arguments = BackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 2, kLanes = 8; // of a row

  static __device__ __forceinline__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    RowTile<C> tile(in);
    if (tile.rows == 0) return;
    if (a.dq_sum) {
      float4 *sum = (float4 *)(a.dq_sum + tile.number * (C.tile_q * C.head_dim));
      for (int i = (int)threadIdx.x; i < C.tile_q * C.head_dim / 4; i += kThreads) sum[i] = float4{0, 0, 0, 0};
    }
    int lane = (int)threadIdx.x % kLanes;
    for (int i0 = 0; i0 < C.tile_q; i0 += kThreads / kLanes) {
      int i = i0 + (int)threadIdx.x / kLanes;
      float sum = 0;
      if (i < tile.rows) {
        for (i32 c = 8 * lane; c < in.head_dim_v; c += 8 * kLanes) {
          T x[8], y[8];
          load(x, a.out, tile, i, c, in.head_dim_v);
          load(y, a.dout, tile, i, c, in.head_dim_v);
#pragma unroll
          for (int e = 0; e < 8; ++e) sum = fmaf(to_float(x[e]), to_float(y[e]), sum);
        }
      }
#pragma unroll
      for (int n = kLanes / 2; n > 0; n /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, n);
      if (i < tile.rows && lane == 0) {
        if (a.dlse) sum -= *a.dlse.at<const float>(tile.batch, tile.head, tile.row + i, 0);
        float *delta = (float *)a.delta + tile.index + i;
        delta[0] = sum, delta[in.rows()] = 0; // and what LSE lacks: kernels/device/settle_row.h
      }
    }
  }

private:
  static __device__ __forceinline__ void load(T (&x)[8], const Operand &o, const RowTile<C> &tile, int i, i32 c, i32 columns) {
    const T *p = o.at<const T>(tile.batch, tile.head, tile.row + i, c);
    if constexpr (C.aligned) {
      *(uint4 *)x = *(const uint4 *)p;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = c + e < columns ? p[e * o.stride[3]] : T{0};
    }
  }
};

// dQ = scale * dq_sum, rounded. A thread takes the 16 columns of a block that four lanes of Backward hold, in rows g and g + 8.
template <RowsConfig C> struct ConvertDq {
  using Arguments = BackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 2;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    RowTile<C> tile(in);
    float scale = (float)in.scale;
    const float *sum = a.dq_sum + tile.number * (C.tile_q * C.head_dim);
    for (int n = (int)threadIdx.x; n < C.tile_q / 2 * (C.head_dim / 16); n += kThreads) {
      int block = n % (C.head_dim / 16), g = n / (C.head_dim / 16) % 8, i = n / (C.head_dim / 16) / 8 * 16 + g;
      if (i >= tile.rows) continue;
      const float *from = sum + (i / 16 * (C.head_dim / 16) + block) * 256;
      alignas(16) T y[2][16];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
#pragma unroll
          for (int k = 0; k < 4; ++k) y[k / 2][8 * c + 2 * t + k % 2] = Convert<T>::from(scale * from[c * 128 + quad(4 * g + t, k)]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (i + 8 * r < tile.rows) store(a.dq, tile, i + 8 * r, 16 * block, in.head_dim, y[r]);
      }
    }
  }

private:
  static __device__ __forceinline__ void store(const Operand &o, const RowTile<C> &tile, int i, i32 c, i32 columns, const T (&y)[16]) {
    T *p = o.at<T>(tile.batch, tile.head, tile.row + i, c);
    if constexpr (C.aligned) {
      if (c < columns) *(uint4 *)p = *(const uint4 *)y;
      if (c + 8 < columns) *(uint4 *)(p + 8) = *(const uint4 *)(y + 8);
    } else {
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        if (c + e < columns) p[e * o.stride[3]] = y[e];
      }
    }
  }
};

} // namespace strobe::passes
