// The gradient of the sinks.
#pragma once
#include "../attention/arguments.h"
#include "../ptx/math.h"
#include "config.h"

namespace strobe::passes {

// d sink = the sum over batch and queries of exp(sink - LSE) * -D. One thread block takes a head, always in the same order. The many terms
// may cancel to a small sum, and in FP32 each addition would round a number far above the result. So they are added up in double, and
// `lost` keeps the rounding errors.
template <SinksConfig C> struct SinkGradient {
  using Arguments = BackwardArguments;
  using T = typename Element<C.dtype>::real;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ void run(const Arguments &a) {
    __shared__ double sums[kThreads];
    const Inputs &in = a.in;
    const i32 h = (i32)blockIdx.x, t = (i32)threadIdx.x;
    const T sink = *in.sinks.at<const T>(0, h, 0, 0);
    double sum = 0, lost = 0;
    for (i32 b = 0; b < in.batch; ++b) {
      const HeldRows s = in.held(b);
      for (i64 i = t; i < s.seqlen_q; i += kThreads) {
        const T lse = *a.lse.at<const T>(b, h, s.q0 + i, 0);
        if (lse == minus_infinity<T>()) continue; // the sink is -inf, and the row sees no key
        const T *delta = static_cast<const T *>(a.delta) + in.row_index(b, h, s.q0 + i);
        add(sum, lost, (double)times_probability(-delta[0], sink, lse, delta[in.rows()] * kLog2e<T>));
      }
    }
    sums[t] = sum - lost;
    __syncthreads();
    for (i32 n = kThreads / 2; n; n /= 2) {
      if (t < n) sums[t] += sums[t + n];
      __syncthreads();
    }
    if (t == 0) *a.dsinks.at<T>(0, h, 0, 0) = (T)sums[0];
  }
};

} // namespace strobe::passes
