// A softcap in the exponent of Hopper's forward; its backward uses the same approximation, so that its P matches the one that LSE sums up.
#pragma once
#include "../device/scores.h"

namespace strobe::sm90 {

// The exponent with a softcap and no other option of the score; x = scale q.k. If |x| <= kSmall c in a warp's whole tile, S stays q.k, and
// c tanh(x / c) is x (1 + kCubic u + kQuintic u^2), u = (x / c)^2, with a relative error of 5e-5. Otherwise S becomes tanh(x / c).
template <Features F, bool kApproximate> struct Softcap {
  static constexpr bool kApplies = F.function == strobe::kSoftcap && kApproximate && !F.scaled && !F.alibi && !F.bias;
  static constexpr float kSmall = 0.55f, kCubic = -0.3315334f, kQuintic = 0.11332051f;
  float to_caps, most; // the factor from q.k to x / c; the largest |q.k| that is small
  float cap;           // c in exp2's unit
  float linear, cubic, quintic;
  bool small; // whether all scores of the warp's tile are small

  template <class Score>
  __device__ __forceinline__ explicit Softcap(const Score &scores)
      : to_caps(scores.scale * scores.inverse_cap), most(__fdividef(kSmall * scores.cap, fabsf(scores.scale))),
        cap(scores.cap * kLog2e<float>), linear(scores.scale * kLog2e<float>), cubic(linear * kCubic * to_caps * to_caps),
        quintic(linear * kQuintic * to_caps * to_caps * (to_caps * to_caps)) {
    if (!(cubic > -1e30f && quintic < 1e30f)) most = -1;
  }
  // Whether all of the warp's scores are small.
  template <int N> __device__ __forceinline__ bool all_small(const float (&s)[N]) const {
    float x = fabsf(s[0]), y = fabsf(s[1]);
#pragma unroll
    for (int i = 2; i < N; i += 2) x = fmaxf(x, fabsf(s[i])), y = fmaxf(y, fabsf(s[i + 1]));
    return !__any_sync(0xFFFFFFFFu, !(fmaxf(x, y) <= most));
  }
  // Must be called before any element is hidden.
  template <int N> __device__ __forceinline__ void begin(float (&s)[N]) {
    small = all_small(s);
    if (small) return;
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = tanh_approximate(s[i] * to_caps);
  }

  __device__ __forceinline__ float factor(float s) const {
    const float u = s * s;
    return __fmaf_rn(__fmaf_rn(quintic, u, cubic), u, linear);
  }
  __device__ __forceinline__ float at(float s, int, float c) const { return __fmaf_rn(s, factor(s), c); }
  __device__ __forceinline__ float constant(float c) const { return c; }
  __device__ __forceinline__ float comparable(float s, int) const { return s; } // tanh keeps the order
  __device__ __forceinline__ float top(float x) const { return x * factor(x); }
  __device__ __forceinline__ float difference(float x) const { return x; }
};

} // namespace strobe::sm90
