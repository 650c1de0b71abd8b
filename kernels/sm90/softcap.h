// tanh of small arguments, for the softcap of forward and backward alike: P in the backward is to be the P that LSE was summed of.
#pragma once

namespace strobe::sm90 {

// tanh(x) = x (1 + kCubic u + kQuintic u^2), u = x^2, for |x| up to kSmall, with a relative error of 5e-5.
struct SmallTanh {
  static constexpr float kSmall = 0.55f, kCubic = -0.3315334f, kQuintic = 0.11332051f;
};

// Whether a warp's scores are all that small: |s| <= most.
template <int N> __device__ __forceinline__ bool all_small(const float (&s)[N], float most) {
  float x = fabsf(s[0]), y = fabsf(s[1]);
#pragma unroll
  for (int i = 2; i < N; i += 2) x = fmaxf(x, fabsf(s[i])), y = fmaxf(y, fabsf(s[i + 1]));
  return !__any_sync(0xFFFFFFFFu, !(fmaxf(x, y) <= most));
}

} // namespace strobe::sm90
