// Merges the results of splits of the keys: O = the sum of exp(LSE_s - LSE) O_s over the splits s. A thread block takes one row. The sink
// joins here, once.
#pragma once
#include "../attention/arguments.h"
#include "../device/chunks.h"
#include "../ptx/math.h"
#include "config.h"

namespace strobe::passes {

template <CombineConfig C> struct Combine {
  using Arguments = ForwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    i64 row = blockIdx.x, length = in.cu_seqlens_q ? in.total_q : in.seqlen_q;
    i64 q = row % length, h = row / length % in.heads, b = row / length / in.heads;
    if constexpr (C.invariant) return merge(a, row, b, h, q);
    const Parts parts = parts_of(a, row, (i32)b, h, q);
    if (C.uneven && parts.count == 1) return; // the only share has written the result itself

    float top = minus_infinity<float>();
#pragma unroll 8
    for (i32 s = 0; s < parts.count; ++s) top = fmaxf(top, a.partial_lse[parts.row(s)]);
    float sink = in.sinks ? *in.sinks.at<const float>(0, h, 0, 0) : minus_infinity<float>();
    top = fmaxf(top, sink);
    bool empty = top == minus_infinity<float>();
    float reference = empty ? 0.0f : top, sum = 0, lost = 0;
#pragma unroll 8
    for (i32 s = 0; s < parts.count; ++s) join(sum, lost, weight(a.partial_lse[parts.row(s)], reference));
    if (sink != minus_infinity<float>()) join(sum, lost, weight(sink, reference));
    sum -= lost;

    float factor = sum == 0 ? 0.0f : 1 / sum;
    for (i32 c = (i32)threadIdx.x; c < in.head_dim_v; c += kThreads) {
      float x = 0, x_lost = 0;
#pragma unroll 8
      for (i32 s = 0; s < parts.count; ++s) {
        const i64 part = parts.row(s);
        join(x, x_lost, weight(a.partial_lse[part], reference) * a.partial_out[part * in.head_dim_v + c]);
      }
      *a.out.at<T>(b, h, q, c) = Convert<T>::from((x - x_lost) * factor);
    }
    if (a.lse && threadIdx.x == 0) *a.lse.at<float>(b, h, q, 0) = sum == 0 ? minus_infinity<float>() : row_lse(reference, 1.0f, sum);
  }

private:
  // Where the results of a row's splits lie: `count` of them, from `first` on, `stride` apart.
  struct Parts {
    i64 first, stride;
    i32 count;
    __device__ __forceinline__ i64 row(i32 s) const { return s * stride + first; }
  };
  static __device__ __forceinline__ Parts parts_of(const Arguments &a, i64 row, i32 b, i64 h, i64 q) {
    const Inputs &in = a.in;
    if constexpr (!C.uneven) return {row, in.rows(), a.splits};
    const i32 *places = a.share_places + 2 * b;
    return {((i64)places[0] * in.heads + h) * in.seqlen_q + q, (i64)in.heads * in.seqlen_q, places[1]};
  }
  // exp(lse - reference). Beside a large sink all of O has this function's error.
  static __device__ __forceinline__ float weight(float lse, float reference) {
    if constexpr (C.dtype == kF32) return probability(lse, 1.0f, reference, 0.0f);
    return exp2((lse - reference) * kLog2e<float>);
  }
  // FP32's sums are compensated: beside a large term many small ones would all be rounded in the same direction.
  static __device__ __forceinline__ void join(float &sum, float &lost, float x) {
    if constexpr (C.dtype == kF32) {
      add(sum, lost, x);
      lost = abs(lost) < -minus_infinity<float>() ? lost : 0.0f; // an infinite sum stays infinite
    } else {
      sum += x;
    }
  }
  static __device__ __forceinline__ void merge(const Arguments &a, i64 row, i64 b, i64 h, i64 q) {
    const Inputs &in = a.in;
    const float sink = in.sinks ? *in.sinks.at<const float>(0, h, 0, 0) : minus_infinity<float>();
    for (i32 c = (i32)threadIdx.x; c < max(in.head_dim_v, (i32)kThreads); c += kThreads) {
      const bool there = c < in.head_dim_v;
      float lse = a.partial_lse[row], x = there ? a.partial_out[row * in.head_dim_v + c] : 0.0f;
#pragma unroll 8
      for (i32 s = 1; s < a.splits; ++s) {
        const i64 part = s * in.rows() + row;
        const Merge merge(lse, a.partial_lse[part]);
        lse = merge.lse, x = merge.of_any(x, there ? a.partial_out[part * in.head_dim_v + c] : 0.0f);
      }
      const Merge with_sink(lse, sink, C.dtype == kF32);
      if (there) *a.out.at<T>(b, h, q, c) = Convert<T>::from(with_sink.of_any(x, 0.0f));
      if (a.lse && c == 0) *a.lse.at<float>(b, h, q, 0) = with_sink.lse;
    }
  }
};

} // namespace strobe::passes
