// What the backward needs of each row first: D = rowsum(dO * O) - dLSE; and afterwards the gradient of the sinks, a sum of it.
#pragma once
#include "../attention/schedule.h"
#include "../simt/config.h"
#include "../simt/numbers.h"

namespace strobe::passes {

using simt::fma;
using simt::to_real;

// A CTA takes kRows rows of one head. The sum runs over the columns in the order and the runs of dP: where a query sees a single key, dP -
// D is then 0 and not a rounding error. Of Config it reads dtype and the head dimensions.
template <simt::Config C> struct SimtDelta {
  using Arguments = BackwardArguments;
  using E = typename Element<C.dtype>::type;
  using T = typename Element<C.dtype>::real;
  static constexpr int kRows = simt::Config::kDeltaRows, kThreads = kRows, kBlocksPerSm = 1, kWidth = simt::Config::kRun;

  static __device__ void run(const Arguments &a) {
    __shared__ T dO[kRows][kWidth + 1], O[kRows][kWidth + 1];
    const Inputs &in = a.in;
    const i32 tiles = (i32)div_up(in.seqlen_q, kRows);
    u32 item = blockIdx.x;
    const i32 q0 = (i32)(item % (u32)tiles) * kRows;
    item /= (u32)tiles;
    const i32 h = (i32)(item % (u32)in.heads), b = (i32)(item / (u32)in.heads);
    const Sequence s = in.sequence(b);
    const i32 count = (i32)min(s.band.seqlen_q - q0, (i64)kRows), t = (i32)threadIdx.x;
    if (count <= 0) return;
    const i64 row = s.q0 + q0;

    T D = T(0);
    for (i32 c0 = 0; c0 < in.head_dim_v; c0 += kWidth) {
      __syncthreads();
      for (i32 i = t; i < kRows * kWidth; i += kThreads) {
        const i32 r = i / kWidth, c = c0 + i % kWidth;
        if (r < count && c < in.head_dim_v) {
          dO[r][i % kWidth] = to_real<T>(*a.dout.at<const E>(b, h, row + r, c));
          O[r][i % kWidth] = to_real<T>(*a.out.at<const E>(b, h, row + r, c));
        }
      }
      __syncthreads();
      T run = T(0);
      if (t < count)
        for (i32 c = 0; c < min(kWidth, in.head_dim_v - c0); ++c) run = fma(dO[t][c], O[t][c], run);
      D += run;
    }
    if (t >= count) return;
    if (a.dlse) D -= *a.dlse.at<const T>(b, h, row + t, 0);
    T *delta = static_cast<T *>(a.delta) + in.row_index(b, h, row + t);
    delta[0] = D, delta[in.rows()] = T(0); // and what LSE lacks: settle.h
  }
};

// d sink = sum over batch and queries of exp(sink - LSE) * -D: one CTA a head, always in the same order.
template <simt::Config C> struct SinkGradient {
  using Arguments = BackwardArguments;
  using T = typename Element<C.dtype>::real;
  static constexpr int kThreads = 256, kBlocksPerSm = 1;

  static __device__ void run(const Arguments &a) {
    __shared__ T sums[kThreads];
    const Inputs &in = a.in;
    const i32 h = (i32)blockIdx.x, t = (i32)threadIdx.x;
    const T sink = *in.sinks.at<const T>(0, h, 0, 0);
    T sum = T(0), lost = T(0); // lost: what sum's roundings dropped (Kahan)
    for (i32 b = 0; b < in.batch; ++b) {
      const Sequence s = in.sequence(b);
      for (i64 i = t; i < s.band.seqlen_q; i += kThreads) {
        const T lse = *a.lse.at<const T>(b, h, s.q0 + i, 0);
        if (lse == minus_infinity<T>()) continue; // a sink of -inf and nothing visible
        const T *delta = static_cast<const T *>(a.delta) + in.row_index(b, h, s.q0 + i);
        const T term = -exp2((sink - lse - delta[in.rows()]) * kLog2e<T>) * delta[0];
        add(sum, lost, term);
      }
    }
    sums[t] = sum - lost;
    __syncthreads();
    for (i32 n = kThreads / 2; n; n /= 2) {
      if (t < n) sums[t] += sums[t + n];
      __syncthreads();
    }
    if (t == 0) *a.dsinks.at<T>(0, h, 0, 0) = sums[0];
  }
};

// dQ from the sum that the backward's CTAs added up.
template <simt::Config C> struct QueryGradient {
  using Arguments = BackwardArguments;
  using E = typename Element<C.dtype>::type;
  using T = typename Element<C.dtype>::real;
  static constexpr int kRows = simt::Config::kDeltaRows, kThreads = 256, kBlocksPerSm = 1;

  static __device__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    const i32 tiles = (i32)div_up(in.seqlen_q, kRows);
    u32 item = blockIdx.x;
    const i32 q0 = (i32)(item % (u32)tiles) * kRows;
    item /= (u32)tiles;
    const i32 h = (i32)(item % (u32)in.heads), b = (i32)(item / (u32)in.heads);
    const Sequence s = in.sequence(b);
    const i32 count = (i32)min(s.band.seqlen_q - q0, (i64)kRows);
    if (count <= 0) return;
    const i64 row = s.q0 + q0;
    const T *sum = reinterpret_cast<const T *>(a.dq_sum) + in.row_index(b, h, row) * C.head_dim;
    for (i32 i = (i32)threadIdx.x; i < count * C.head_dim; i += kThreads) {
      const i32 r = i / C.head_dim, c = i % C.head_dim;
      if (c < in.head_dim) *a.dq.at<E>(b, h, row + r, c) = Convert<E>::from(sum[i]);
    }
  }
};

} // namespace strobe::passes
