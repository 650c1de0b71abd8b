// A softcap and nothing else of the options that make scores more than products: P and the softcap's slope by few instructions.
#pragma once
#include "../../device/scores.h"
#include "../../ptx/mma.h"
#include "../softcap.h"

namespace strobe::sm90 {

template <Features F> struct BackwardSoftcap : SmallTanh {
  static constexpr bool kApplies = F.function == kSoftcap && !F.scaled && !F.alibi && !F.bias;
  float to_caps, cap; // from q.k to x / c; c in exp2's unit

  template <class Score>
  __device__ __forceinline__ explicit BackwardSoftcap(const Score &scores)
      : to_caps(scores.scale * scores.inverse_cap), cap(scores.cap * kLog2e<float>) {}

  // q.k -> P times the slope, in S, and P as T. lse: where -LSE of this lane's first two queries is; those of the next two 32 bytes
  // further.
  template <class T, int N> __device__ __forceinline__ void exponentiate(float (&S)[N], u32 (&P)[N / 2], u32 lse) const {
    const float square = to_caps * to_caps, cubic = kCubic * square * to_caps, quintic = kQuintic * (square * square) * to_caps;
    const float most = cubic > -1e30f && quintic < 1e30f ? __fdividef(kSmall, to_caps) : -1;
    if (all_small(S, most)) {
      exponentiate<T>(S, P, lse, [&](float s, float &slope) {
        const float u = s * s, t = s * __fmaf_rn(__fmaf_rn(quintic, u, cubic), u, to_caps);
        slope = __fmaf_rn(-t, t, 1.0f); // which does not cancel: t is small
        return t;
      });
    } else {
      exponentiate<T>(S, P, lse, [&](float s, float &slope) { return tanh_approximate(s * to_caps, slope); });
    }
  }

private:
  template <class T, int N, class Tanh>
  __device__ __forceinline__ void exponentiate(float (&S)[N], u32 (&P)[N / 2], u32 lse, const Tanh &tanh) const {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      float negative[2], p[4];
      load_shared(negative, lse + 32 * i);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float slope;
        const float t = tanh(S[4 * i + k], slope);
        p[k] = exp2(__fmaf_rn(t, cap, negative[k % 2]));
        S[4 * i + k] = p[k] * slope;
      }
      P[2 * i] = pack<T>(p[0], p[1]), P[2 * i + 1] = pack<T>(p[2], p[3]);
    }
  }
};

} // namespace strobe::sm90
