// P and the softcap's derivative in few instructions, where no other option changes the scores.
#pragma once
#include "../../device/scores.h"
#include "../../ptx/mma.h"
#include "../softcap.h"

namespace strobe::sm90 {

template <Features F> struct BackwardSoftcap {
  using Forward = Softcap<F, true>;
  static constexpr bool kApplies = Forward::kApplies;
  const Forward forward;

  template <class Score> __device__ __forceinline__ explicit BackwardSoftcap(const Score &scores) : forward(scores) {}

  // Replaces q.k in S by P times the derivative, and writes P, rounded, to P. lse: the address of -LSE of this lane's first two queries;
  // -LSE of its next two queries lies 32 bytes further.
  template <class T, int N> __device__ __forceinline__ void exponentiate(float (&S)[N], u32 (&P)[N / 2], u32 lse) const {
    const float to_caps = forward.to_caps, square = to_caps * to_caps;
    const float cubic = Forward::kCubic * square * to_caps, quintic = Forward::kQuintic * (square * square) * to_caps;
    if (forward.all_small(S)) {
      exponentiate<T>(S, P, lse, [&](float s, float &slope) {
        const float u = s * s, t = s * __fmaf_rn(__fmaf_rn(quintic, u, cubic), u, to_caps);
        slope = __fmaf_rn(-t, t, 1.0f); // does not cancel, because t is small
        return t;
      });
    } else {
      exponentiate<T>(S, P, lse, [&](float s, float &slope) { return tanh_approximate<false>(s * to_caps, slope); });
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
        p[k] = exp2(__fmaf_rn(t, forward.cap, negative[k % 2]));
        S[4 * i + k] = p[k] * slope;
      }
      P[2 * i] = pack<T>(p[0], p[1]), P[2 * i + 1] = pack<T>(p[2], p[3]);
    }
  }
};

} // namespace strobe::sm90
