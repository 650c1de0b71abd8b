// Makes dK and dV where the query heads of a key head are divided into shares: each thread block of the backward has stored the sum over
// its share in FP32.
#pragma once
#include "../attention/arguments.h"
#include "../ptx/math.h"
#include "config.h"

namespace strobe::passes {

// Adds up the shares, always in the same order. A thread block takes some rows of one key head, a warp one row at a time.
template <SharesConfig C> struct SumShares {
  using Arguments = SharesArguments;
  using T = Result<C.dtype, C.partial || C.adds>;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 4;

  static __device__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    const i32 tile = (i32)blockIdx.x % a.tiles, pair = (i32)blockIdx.x / a.tiles, b = pair / in.heads_kv, h = pair % in.heads_kv;
    const Sequence s = in.sequence<C.keys()>(b);
    const i64 end = min((i64)(tile + 1) * C.rows(), s.band.seqlen_k);
    for (i64 j = (i64)tile * C.rows() + threadIdx.x / 32; j < end; j += kThreads / 32) {
      add(a, a.dk, a.dk_shares, b, h, s.k0 + j, in.head_dim);
      add(a, a.dv, a.dv_shares, b, h, s.k0 + j, in.head_dim_v);
    }
  }

private:
  // Each lane takes four columns at a time: rows of all operands are multiples of 16 bytes, or Hopper's backward refuses them.
  static __device__ __forceinline__ void add(const Arguments &a, const Operand &to, const Operand &shares, i32 b, i32 h, i64 row,
                                             i32 columns) {
    if (!to) return;
    for (i32 c = (i32)threadIdx.x % 32 * 4; c < columns; c += 128) {
      T *const target = to.at<T>(b, h, row, c);
      float sum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (C.adds) sum[i] = target[i];
      }
      const float *share = shares.at<const float>(b, (i64)h * a.shares, row, c);
#pragma unroll 4
      for (i32 n = 0; n < a.shares; ++n, share += shares.stride[1]) {
        const float4 x = *(const float4 *)share;
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) target[i] = Convert<T>::from(sum[i]);
    }
  }
};

} // namespace strobe::passes
