// What exp2 is taken of, element by element: where options of the score are a few multiply-adds, they join the one that plain scores take.
#pragma once
#include "../attention/scores.h"
#include "config.h"
#include "given.h"

namespace strobe::sm90 {

// exp2's argument is at(s, i, c), c = constant(-M). A row's reference M follows top(the largest comparable(s, i)). i: as in a lane's S, of row i / 2 % 2 and column column(i), without the lane's share.
__device__ __forceinline__ constexpr int column(int i) { return i / 4 * 8 + i % 2; }

struct Linear {
  float unit;
  __device__ __forceinline__ float at(float s, int, float c) const { return __fmaf_rn(s, unit, c); }
  __device__ __forceinline__ float constant(float c) const { return c; }
  __device__ __forceinline__ float comparable(float s, int) const { return s; }
  __device__ __forceinline__ float top(float x) const { return x * unit; }
  __device__ __forceinline__ float difference(float x) const { return x; }
};
// M and S in the unit of the score.
struct Natural {
  static constexpr float kLog2e = 1.44269504088896340736f;
  __device__ __forceinline__ float at(float s, int, float c) const { return (s + c) * kLog2e; }
  __device__ __forceinline__ float constant(float c) const { return c; }
  __device__ __forceinline__ float comparable(float s, int) const { return s; }
  __device__ __forceinline__ float top(float x) const { return x; }
  __device__ __forceinline__ float difference(float x) const { return x * kLog2e; }
};

// S stays q.k while softcap, ALiBi and a bias join the exponent. Not in it: a hyperbolic or scaled score, the exact softcap, and a bias that is
// read element by element.
template <Config C, class Score> struct Exponent {
  static constexpr Features F = C.features;
  static constexpr bool kSoftcap = F.function == strobe::kSoftcap;
  static constexpr bool kIs =
      (kSoftcap || F.alibi || F.bias) && !F.scaled && (F.function == kLinear || (kSoftcap && C.reference != kExact)) && (!F.bias || C.wide);
  static constexpr float kLog2e = 1.44269504088896340736f;
  // c tanh(x / c) is x (1 + kCubic u + kQuintic u^2), u = (x / c)^2, for |x| up to kSmall c, with a relative error of 5e-5.
  static constexpr float kSmall = 0.55f, kCubic = -0.3315334f, kQuintic = 0.11332051f;

  const Given<C, Score> &given;
  const i32 offset, high; // as in Score
  const float linear;     // of a raw score, in exp2's unit
  float cap, inverse_cap; // the same; and what tanh takes
  float most, cubic, quintic;
  float full_slope;
  // Of the tile: the scores' unit, ALiBi's slope and value at the lane's first row and column; whether the polynomial serves; whether all keys
  // lie before their queries, where ALiBi's penalty grows from tile to tile.
  float unit, slope, start;
  bool small, before;

  __device__ __forceinline__ Exponent(const Score &scores, float slope, const Given<C, Score> &given)
      : given(given), offset(scores.offset), high(scores.high), linear(scores.scale * kLog2e), cap(scores.cap * kLog2e),
        inverse_cap(scores.scale * scores.inverse_cap), most(__fdividef(kSmall * scores.cap, scores.scale)),
        full_slope(__shfl_sync(0xFFFFFFFFu, slope * kLog2e, 0)), unit(linear) {
    const float x = inverse_cap * inverse_cap;
    cubic = linear * kCubic * x, quintic = linear * kQuintic * x * x;
    if (!(cubic > -1e30f && quintic < 1e30f)) most = -1;
  }

  // S of the keys [begin, end) and the warp's queries from row on. Before anything is hidden.
  template <int N> __device__ __forceinline__ void begin(float (&s)[N], i32 row, i32 begin, i32 end) {
    bool across = false; // a query may see keys on either side of it
    if constexpr (F.alibi) {
      before = end <= row + offset + 1;
      const bool after = begin >= row + 15 + offset;
      across = !before && !after && !(F.band && high <= offset);
      slope = after ? -full_slope : full_slope;
      start = slope * (float)(begin + tile::lane_column(0, 0) - row - tile::lane_row(0) - offset);
    }
    if constexpr (kSoftcap) {
      float x = fabsf(s[0]), y = fabsf(s[1]);
#pragma unroll
      for (int i = 2; i < N; i += 2) x = fmaxf(x, fabsf(s[i])), y = fmaxf(y, fabsf(s[i + 1]));
      small = !__any_sync(0xFFFFFFFFu, !(fmaxf(x, y) <= most)) && !across;
      if (!small) {
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = tanh_approximate(s[i] * inverse_cap);
      }
      unit = small ? linear : cap;
    }
    if constexpr (F.alibi) {
      if (!across) return;
      // From -(slope x) to -|slope x|: twice what lies beyond the query, in S's unit.
      const float twice = __fdividef(-2.0f, unit);
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(fmaxf(at_line(i), 0), twice, s[i]);
    }
  }
  __device__ __forceinline__ float at_line(int i) const { return __fmaf_rn(slope, (float)(column(i) - 8 * (i / 2 % 2)), start); }

  template <bool kPolynomial> struct Of {
    const Exponent &e;
    __device__ __forceinline__ float at(float s, int i, float c) const {
      if constexpr (F.alibi) c = __fmaf_rn(e.slope, (float)(column(i) - 8 * (i / 2 % 2)), c);
      if constexpr (F.bias) c = __fmaf_rn(e.given.bias.at(i), kLog2e, c);
      return __fmaf_rn(s, factor(s), c);
    }
    __device__ __forceinline__ float constant(float c) const { return F.alibi ? c + e.start : c; }
    // A softcap alone keeps the order.
    __device__ __forceinline__ float comparable(float s, int i) const { return F.alibi || F.bias ? at(s, i, constant(0)) : s; }
    __device__ __forceinline__ float top(float x) const { return F.alibi || F.bias ? x : x * factor(x); }
    __device__ __forceinline__ float difference(float x) const { return x; }

  private:
    __device__ __forceinline__ float factor(float s) const {
      if constexpr (!kPolynomial) return e.unit;
      const float u = s * s;
      return __fmaf_rn(__fmaf_rn(e.quintic, u, e.cubic), u, e.linear);
    }
  };
};

} // namespace strobe::sm90
