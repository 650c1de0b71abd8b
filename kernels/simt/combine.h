// The parts of a forward that was split over keys, merged: O = sum_s exp(LSE_s - LSE) O_s. Any dtype of O.
#pragma once
#include "../attention/schedule.h"
#include "config.h"
#include "numbers.h"

namespace strobe::simt {

// A warp takes a row. Of Config it reads dtype alone.
template <Config C> struct Combine {
  using Arguments = ForwardArguments;
  using E = typename Element<C.dtype>::type;
  static constexpr int kRows = Config::kCombineRows, kThreads = 32 * kRows, kBlocksPerSm = 1;

  static __device__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    const i32 tiles = (i32)div_up(in.seqlen_q, kRows), lane = (i32)threadIdx.x % 32;
    u32 item = blockIdx.x;
    const i32 i = (i32)(item % (u32)tiles) * kRows + (i32)threadIdx.x / 32;
    item /= (u32)tiles;
    const i32 h = (i32)(item % (u32)in.heads), b = (i32)(item / (u32)in.heads);
    const Sequence s = in.sequence(b);
    if (i >= s.band.seqlen_q) return;
    const i64 row = s.q0 + i, index = in.row_index(b, h, row), rows = in.rows();

    const float sink = in.sinks ? *in.sinks.at<const float>(0, h, 0, 0) : minus_infinity<float>();
    float most = sink, total = 0;
    for (i32 n = 0; n < a.splits; ++n) most = maximum(most, a.partial_lse[n * rows + index]);
    const float reference = most == minus_infinity<float>() ? 0 : most;
    for (i32 n = 0; n < a.splits; ++n) total += exp2((a.partial_lse[n * rows + index] - reference) * log2_e<float>());
    if (in.sinks) total += exp2((sink - reference) * log2_e<float>());
    const bool empty = total == 0;
    const float lse = empty ? minus_infinity<float>() : most + log2(total) * ln_2<float>();

    for (i32 c = lane; c < in.head_dim_v; c += 32) {
      float sum = 0;
      for (i32 n = 0; n < a.splits; ++n) {
        const float part = a.partial_lse[n * rows + index];
        if (part == minus_infinity<float>()) continue; // saw nothing
        sum = fma(exp2((part - reference) * log2_e<float>()), a.partial_out[(n * rows + index) * in.head_dim_v + c], sum);
      }
      *a.out.at<E>(b, h, row, c) = Convert<E>::from(empty ? 0 : sum / total);
    }
    if (lane == 0 && a.lse) *a.lse.at<float>(b, h, row, 0) = lse;
  }
};

} // namespace strobe::simt
