// Functions of the score for which Hopper has faster forms: a penalty (ALiBi), and the softcap. The backward uses the same approximation of
// the softcap as the forward, so that its P matches the P that LSE sums up.
#pragma once
#include "../device/scores.h"
#include "../ptx/mma.h"
#include "../tile/registers.h"

namespace strobe::sm90 {

// Whether the score is scale q.k and what is added to it, so that the exponent is a sum of multiply-adds.
template <Features F> inline constexpr bool kAddsOnly = F.function == kLinear && !F.scaled;

// What a penalty adds to the forward's exponent, in exp2's unit, where the score adds only. Along a row it is slope * column + a constant,
// up to the key opposite the query; S takes the change of sign behind that.
template <Features F> struct PenaltyForm {
  static constexpr bool kApplies = F.penalty && kAddsOnly<F>;
  const i32 offset, high; // the distance of query 0 and key 0; as in Scores
  const float full_slope;
  float slope, start; // for this tile: the slope, and the penalty's term at the lane's first row and column
  bool before;        // no key of the tile lies past its query: the penalty then grows from tile to tile

  template <class Score>
  __device__ __forceinline__ PenaltyForm(const Score &scores, float slope)
      : offset(scores.distance(0, 0)), high(scores.high), full_slope(__shfl_sync(0xFFFFFFFFu, slope * kLog2e<float>, 0)) {}

  // Begins a tile. s: S of the keys [begin, end) and the warp's queries from `row` on, before any element is hidden; unit: of S.
  template <int N> __device__ __forceinline__ void begin(float (&s)[N], float unit, i32 row, i32 begin, i32 end) {
    const bool after = !(F.penalty & kSigned) && begin >= row + 15 + offset;
    before = end <= row + offset + 1;
    slope = after ? -full_slope : full_slope;
    const float first = (float)(begin + tile::lane_column(0, 0) - row - tile::lane_row(0) - offset); // how far the key lies past the query
    start = slope * first;
    if ((F.penalty & kSigned) || before || after || (F.band && high <= offset)) return;
    const float twice = __fdividef(-2 * slope, unit); // changes -(slope x) to -|slope x| for keys past their query
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(fmaxf(first + place(i), 0), twice, s[i]);
  }
  // Column minus row, relative to the lane's first element.
  static __device__ __forceinline__ float place(int i) { return (float)(i / 4 * 8 + i % 2 - 8 * (i / 2 % 2)); }
  __device__ __forceinline__ float added(int i, float c) const { return __fmaf_rn(slope, place(i), c); }
};

// The same in the backward, where rows are keys: for a tile of queries from q on, and the lane's first key.
template <Features F> struct BackwardPenaltyForm {
  static constexpr bool kApplies = F.penalty && kAddsOnly<F> && !F.bias;
  float unit, slope = 0, distance = 0; // from S to exp2's argument; the slope in exp2's unit; first query minus first key

  template <class Score> __device__ __forceinline__ BackwardPenaltyForm(const Score &scores, i32 q, i32 head, i32 key) : unit(scores.unit) {
    if constexpr (kApplies) {
      unit = scores.scale * kLog2e<float>, slope = scores.row(q, head).slope * kLog2e<float>;
      distance = (float)scores.distance(q, key);
    }
  }
  // query, key: how far behind the first ones.
  __device__ __forceinline__ float added(int query, int key, float exponent) const {
    if constexpr (!kApplies) return exponent;
    const float far = distance + (float)(query - key);
    return __fmaf_rn(-slope, F.penalty & kSigned ? far : fabsf(far), exponent);
  }
};

// The exponent if a softcap is the score's only option; x = scale q.k. If |x| <= kSmall c in a warp's whole tile, S stays q.k, and c tanh(x
// / c) is computed as x (1 + kCubic u + kQuintic u^2), u = (x / c)^2, with a relative error of 5e-5. Otherwise S becomes tanh(x / c).
template <Features F, bool kApproximate> struct FastForm {
  static constexpr bool kApplies = F.function == kCapped && kApproximate && !F.scaled && !F.penalty && !F.bias;
  static constexpr float kSmall = 0.55f, kCubic = -0.3315334f, kQuintic = 0.11332051f;
  float to_caps, most; // the factor from q.k to x / c; the largest |q.k| that counts as small
  float cap;           // c in exp2's unit
  float linear, cubic, quintic;
  bool small; // whether all scores of the warp's tile are small

  template <class Score>
  __device__ __forceinline__ explicit FastForm(const Score &scores)
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

// The backward's form: P and the derivative in few instructions, where no other option changes the scores.
template <Features F> struct BackwardFastForm {
  using Forward = FastForm<F, true>;
  static constexpr bool kApplies = Forward::kApplies;
  const Forward forward;

  template <class Score> __device__ __forceinline__ explicit BackwardFastForm(const Score &scores) : forward(scores) {}

  // Replaces q.k in S by P times the derivative, and writes P, rounded, to the argument P. lse: the address of -LSE of this lane's first
  // two queries; -LSE of the lane's next two queries lies 32 bytes further.
  template <class T, int N> __device__ __forceinline__ void exponentiate(float (&S)[N], u32 (&P)[N / 2], u32 lse) const {
    const float to_caps = forward.to_caps, square = to_caps * to_caps;
    const float cubic = Forward::kCubic * square * to_caps, quintic = Forward::kQuintic * (square * square) * to_caps;
    if (forward.all_small(S)) {
      exponentiate<T>(S, P, lse, [&](float s, float &slope) {
        const float u = s * s, t = s * __fmaf_rn(__fmaf_rn(quintic, u, cubic), u, to_caps);
        slope = __fmaf_rn(-t, t, 1.0f); // no cancellation, because t is small
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
