// Online softmax of the rows that a lane holds: kM blocks of 16 rows, two rows of each. M is the reference: P = exp2(S * unit - M). It is
// the running maximum, or stays behind it by at most kSlack, so that most tiles need no rescaling. M is kept in exp2's unit, which saves an
// instruction; kNatural: in that of the scores, where those may be as large as numbers go.
#pragma once
#include "../ptx/math.h"
#include "../tile/registers.h"

namespace strobe {

// exp2's argument is (s - M) * kUnit<..>, a natural logarithm M * kLn<..>.
template <bool kNatural> inline constexpr float kUnit = kNatural ? kLog2e<float> : 1.0f;
template <bool kNatural> inline constexpr float kLn = kNatural ? 1.0f : kLn2<float>;

template <int kM, bool kNatural = false> struct RowSoftmax {
  float M[kM][2], l[kM][2]; // l: of the columns that this lane has seen

  __device__ __forceinline__ RowSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) M[i / 2][i % 2] = minus_infinity<float>(), l[i / 2][i % 2] = 0;
  }

  // Takes the maxima of a tile in. If a reference moved, multiplies l and O by what that makes of them.
  template <bool kExact, int kN, int kDv>
  __device__ __forceinline__ void follow(const tile::Accumulator (&S)[kM][kN], float unit, tile::Accumulator (&O)[kM][kDv]) {
    constexpr float kSlack = kExact ? 0 : 8 / kUnit<kNatural>;
    float top[kM][2];
    bool far = false;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      int m = i / 2, r = i % 2;
      float x = S[m][0].x[0][2 * r];
#pragma unroll
      for (int k = 1; k < 4 * kN; ++k) x = fmaxf(x, S[m][k / 4].x[k / 2 % 2][2 * r + k % 2]);
      top[m][r] = kNatural ? x : x * unit;
      far |= top[m][r] > M[m][r] + kSlack;
    }
    if (!__any_sync(0xFFFFFFFFu, far)) return;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      int m = i / 2, r = i % 2;
      float before = M[m][r], now = fmaxf(before, tile::row_max(top[m][r]));
      float alpha = now == minus_infinity<float>() ? 1.0f : exp2((before - now) * kUnit<kNatural>);
      M[m][r] = now;
      l[m][r] *= alpha;
#pragma unroll
      for (int k = 0; k < 4 * kDv; ++k) O[m][k / 4].x[k / 2 % 2][2 * r + k % 2] *= alpha;
    }
  }
  // Whether all of O and l is.
  template <int kDv> __device__ __forceinline__ bool finite(const tile::Accumulator (&O)[kM][kDv]) const {
    float zero = 0; // or NaN
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int k = 0; k < 8 * kDv; ++k) zero = __fmaf_rn(O[m][k / 8].x[k / 4 % 2][k % 4], 0.0f, zero);
      zero += (l[m][0] + l[m][1]) * 0.0f;
    }
    return zero == 0;
  }

  // What scores are measured against: M, or 0 in a row that has seen nothing yet (-inf - -inf is not a number).
  __device__ __forceinline__ float reference(int m, int r) const { return M[m][r] == minus_infinity<float>() ? 0.0f : M[m][r]; }

  // P of the block S in block row m.
  __device__ __forceinline__ void exponentiate(tile::Accumulator &S, int m, float unit) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float negative = -reference(m, r);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float &p = S.x[k / 2][2 * r + k % 2];
        p = exp2(kNatural ? (p + negative) * unit : __fmaf_rn(p, unit, negative));
        l[m][r] += p;
      }
    }
  }
};

// A row's end: O is to be multiplied by `factor`; the natural LSE. sink (in M's unit): one more term of the denominator, -inf: none.
struct RowEnd {
  float factor, lse;
  __device__ __forceinline__ RowEnd(float M, float l, float sink, bool natural = false) {
    const float unit = natural ? kUnit<true> : 1.0f, top = fmaxf(M, sink);
    const float alpha = top == minus_infinity<float>() ? 0.0f : exp2((M - top) * unit);
    l *= alpha;
    if (sink != minus_infinity<float>()) l += exp2((sink - top) * unit);
    factor = l == 0 ? 0.0f : __fdividef(alpha, l); // 2 ulp; l is far below 2^126
    lse = l == 0 ? minus_infinity<float>() : natural ? top + __log2f(l) * kLn<false> : (top + __log2f(l)) * kLn<false>;
  }
};

} // namespace strobe
