// The passes around the backward of FlashAttention-2, one warp per row. Before the backward: D. After it: dQ, summed in FP32, is written to
// the caller's tensor.
#pragma once
#include "tile.h"

namespace strobe::ladder {

template <Config C> struct Delta { // D = rowsum(dO o O)
  using Arguments = BackwardArguments;
  static constexpr i32 kThreads = kTileThreads, kBlocksPerSm = 1;
  using T = typename Element<C.dtype>::type;

  static __device__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    const i64 row = ((i64)blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= in.rows()) return;
    const i64 i = row % in.seqlen_q, h = row / in.seqlen_q % in.heads, b = row / in.seqlen_q / in.heads;
    float D = 0;
    for (i64 c = lane; c < in.head_dim; c += 32) D += to_float(*a.dout.at<const T>(b, h, i, c)) * to_float(*a.out.at<const T>(b, h, i, c));
    for (i32 lanes = 16; lanes; lanes /= 2) D += __shfl_xor_sync(~0u, D, lanes);
    if (lane == 0) static_cast<float *>(a.delta)[row] = D;
  }
};

template <Config C> struct StoreQueryGradient { // dQ = scale * sum
  using Arguments = BackwardArguments;
  static constexpr i32 kThreads = kTileThreads, kBlocksPerSm = 1;
  using T = typename Element<C.dtype>::type;

  static __device__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    const i64 row = ((i64)blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= in.rows()) return;
    const i64 i = row % in.seqlen_q, h = row / in.seqlen_q % in.heads, b = row / in.seqlen_q / in.heads;
    for (i64 c = lane; c < in.head_dim; c += 32)
      *a.dq.at<T>(b, h, i, c) = Convert<T>::from(a.dq_sum[row * in.head_dim + c] * float(in.scale));
  }
};

} // namespace strobe::ladder
