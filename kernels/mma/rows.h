// What the backward does to each row before and after: D, room for dQ, dQ's conversion, dsinks.
#pragma once
#include "../attention/arguments.h"
#include "../ptx/math.h"
#include "backward_config.h"

namespace strobe::mma {

// Which row a group of 8 threads has.
struct Row {
  i32 batch, head;
  i64 row;   // in the tensors
  i64 index; // in contiguous scratch
  bool inside;
};
__device__ __forceinline__ Row row_of_group(const Inputs &in, int step) {
  i64 tiles = div_up(in.seqlen_q, RowsConfig::rows_per_block());
  i64 pair = blockIdx.x / tiles,
      i = blockIdx.x % tiles * RowsConfig::rows_per_block() + threadIdx.x / 8 + step * (RowsConfig::threads() / 8);
  Row r{(i32)(pair / in.heads), (i32)(pair % in.heads), 0, 0, false};
  Sequence s = in.sequence(r.batch);
  r.row = s.q0 + i, r.index = in.row_index(r.batch, r.head, r.row), r.inside = i < s.band.seqlen_q;
  return r;
}

// D = rowsum(dO * O) - dLSE; rows of dq_sum become 0, and so do the turns.
template <RowsConfig C> struct Delta {
  using Arguments = BackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 2;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    int lane = threadIdx.x % 8;
    for (int step = 0; step < C.rows_per_block() * 8 / kThreads; ++step) {
      Row r = row_of_group(in, step);
      float sum = 0;
      if (r.inside) {
        for (i32 c = 8 * lane; c < in.head_dim_v; c += 64) {
          T x[8], y[8];
          load(x, a.out, r, c, in.head_dim_v);
          load(y, a.dout, r, c, in.head_dim_v);
#pragma unroll
          for (int e = 0; e < 8; ++e) sum = fmaf(to_float(x[e]), to_float(y[e]), sum);
        }
        if (a.dq_sum) {
          i32 pitch = (in.head_dim + 31) / 32 * 32;
          for (i32 c = 4 * lane; c < pitch; c += 32) *(float4 *)(a.dq_sum + r.index * pitch + c) = float4{0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int n = 4; n > 0; n /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, n);
      if (r.inside && lane == 0) {
        if (a.dlse) sum -= *a.dlse.at<const float>(r.batch, r.head, r.row, 0);
        ((float *)a.delta)[r.index] = sum;
      }
    }
  }

private:
  static __device__ __forceinline__ void load(T (&x)[8], const Operand &o, const Row &r, i32 c, i32 columns) {
    const T *p = o.at<const T>(r.batch, r.head, r.row, c);
    if constexpr (C.aligned) {
      *(uint4 *)x = *(const uint4 *)p;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = c + e < columns ? p[e * o.stride[3]] : T{0};
    }
  }
};

// dQ = scale * dq_sum, rounded.
template <RowsConfig C> struct ConvertDq {
  using Arguments = BackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 2;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    int lane = threadIdx.x % 8;
    float scale = (float)in.scale;
    i32 pitch = (in.head_dim + 31) / 32 * 32;
    for (int step = 0; step < C.rows_per_block() * 8 / kThreads; ++step) {
      Row r = row_of_group(in, step);
      if (!r.inside) continue;
      for (i32 c = 16 * lane; c < in.head_dim; c += 128) {
        float x[16];
#pragma unroll
        for (int k = 0; k < 4; ++k) *(float4 *)(x + 4 * k) = *(const float4 *)(a.dq_sum + r.index * pitch + c + 4 * k);
        alignas(16) T y[16];
#pragma unroll
        for (int k = 0; k < 16; ++k) y[k] = Convert<T>::from(scale * x[k]);
        T *p = a.dq.at<T>(r.batch, r.head, r.row, c);
        if constexpr (C.aligned) {
          *(uint4 *)p = *(const uint4 *)y;
          if (c + 8 < in.head_dim) *(uint4 *)(p + 8) = *(const uint4 *)(y + 8);
        } else {
#pragma unroll
          for (int e = 0; e < 16; ++e) {
            if (c + e < in.head_dim) p[e * a.dq.stride[3]] = y[e];
          }
        }
      }
    }
  }
};

// dsinks of one head: sum of exp(sink - LSE) (dLSE - D0) = -exp(sink - LSE) D over batch and queries, in a fixed order.
template <RowsConfig C> struct Sinks {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    __shared__ float part[kThreads];
    i32 head = (i32)blockIdx.x;
    float sink = *in.sinks.at<const float>(0, head, 0, 0), sum = 0;
    for (i32 b = 0; b < in.batch; ++b) {
      Sequence s = in.sequence(b);
      for (i64 i = threadIdx.x; i < s.band.seqlen_q; i += kThreads) {
        float lse = *a.lse.at<const float>(b, head, s.q0 + i, 0);
        if (sink != minus_infinity<float>()) // else it has no part in anything
          sum -= exp2((sink - lse) * 1.4426950408889634f) * ((const float *)a.delta)[in.row_index(b, head, s.q0 + i)];
      }
    }
    part[threadIdx.x] = sum;
    for (int n = kThreads / 2; n > 0; n /= 2) {
      __syncthreads();
      if ((int)threadIdx.x < n) part[threadIdx.x] += part[threadIdx.x + n];
    }
    if (threadIdx.x == 0) *a.dsinks.at<float>(0, head, 0, 0) = part[0];
  }
};

} // namespace strobe::mma
