// Online softmax of the two rows that a lane holds of a warpgroup's S: s[4j + 2r + e] is row r, column 8j + e (and the lane's share). M is
// the reference in exp2's unit: P = exp2(exponent - M), as exponent.h has it.
#pragma once
#include "../../ptx/math.h"
#include "../../tile/registers.h"
#include "config.h"

namespace strobe::sm90 {

struct Softmax {
  float M[2] = {minus_infinity<float>(), minus_infinity<float>()};
  float l[2] = {0, 0};     // of the columns that this lane has seen
  float alpha[2] = {1, 1}; // what l was multiplied by last, and O is to be

  // Takes a tile's maxima in. Without a branch: O may be in the making meanwhile.
  template <bool kExact, int N, class Exponent> __device__ __forceinline__ void follow(const float (&s)[N], const Exponent &exponent) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto of = [&](int i) { return exponent.comparable(s[i], i); };
      float x = of(2 * r), y = of(2 * r + 1);
#pragma unroll
      for (int j = 1; j < N / 4; ++j) x = fmaxf(x, of(4 * j + 2 * r)), y = fmaxf(y, of(4 * j + 2 * r + 1));
      float top = exponent.top(tile::row_max(fmaxf(x, y))), before = M[r];
      float now = kExact ? fmaxf(before, top) : top > before + 8.0f ? top : before;
      alpha[r] = now == before ? 1.0f : exp2(exponent.difference(before - now));
      M[r] = now;
      l[r] *= alpha[r];
    }
  }
  __device__ __forceinline__ bool moved() const { return __any_sync(0xFFFFFFFFu, alpha[0] != 1.0f || alpha[1] != 1.0f); }
  template <int N> __device__ __forceinline__ void rescale(float (&o)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= alpha[i / 2 % 2];
  }

  // S -> P
  template <int N, class Exponent> __device__ __forceinline__ void exponentiate(float (&s)[N], const Exponent &exponent) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float c = exponent.constant(M[r] == minus_infinity<float>() ? 0.0f : -M[r]);
      float x = l[r], y = 0;
#pragma unroll
      for (int j = 0; j < N / 4; ++j) {
        const int i = 4 * j + 2 * r;
        float &p = s[i], &q = s[i + 1];
        x += p = exp2(exponent.at(p, i, c));
        q = exp2(exponent.at(q, i + 1, c));
        y = j ? y + q : q;
      }
      l[r] = x + y;
    }
  }
};

} // namespace strobe::sm90
