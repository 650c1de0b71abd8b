// Forms of the exponent (device/softmax.h) in Hopper's forward: options of the score that are a few multiply-adds are fused into the
// multiply-add that plain scores take.
#pragma once
#include "../../device/scores.h"
#include "../../device/softmax.h"
#include "../fast_form.h"
#include "config.h"
#include "given.h"

namespace strobe::sm90 {

// The exponent with a penalty, a bias, or both: S stays q.k, and the exponent adds what the options add to scores.
template <Config C, class Score> struct Line {
  static constexpr Features F = C.features;
  static constexpr bool kPenalty = PenaltyForm<F>::kApplies;
  static constexpr bool kApplies = (kPenalty || F.bias) && kAddsOnly<F> && (!F.bias || C.bias_by_tma);
  const float unit;
  PenaltyForm<F> penalty;

  __device__ __forceinline__ Line(const Score &scores, float slope) : unit(scores.scale * kLog2e<float>), penalty(scores, slope) {}

  // Begins a tile. s: S of the keys [begin, end) and the warp's queries from `row` on, before any element is hidden.
  template <int N> __device__ __forceinline__ void begin(float (&s)[N], i32 row, i32 begin, i32 end) {
    if constexpr (kPenalty) penalty.begin(s, unit, row, begin, end);
  }
  // Whether a row may have seen only keys past its query, where a penalty falls from tile to tile.
  __device__ __forceinline__ bool falls() const { return kPenalty && !penalty.before; }

  struct Exponent {
    const Line &line;
    Given<C, Score> &given;
    __device__ __forceinline__ float at(float s, int i, float c) const {
      given.bias.read(i);
      if constexpr (kPenalty) c = line.penalty.added(i, c);
      if constexpr (F.bias) c = __fmaf_rn(given.bias.at(i), kLog2e<float>, c);
      return __fmaf_rn(s, line.unit, c);
    }
    __device__ __forceinline__ float constant(float c) const { return kPenalty ? c + line.penalty.start : c; }
    __device__ __forceinline__ float comparable(float s, int i) const { return at(s, i, constant(0)); }
    __device__ __forceinline__ float top(float x) const { return x; }
    __device__ __forceinline__ float difference(float x) const { return x; }
  };
  __device__ __forceinline__ Exponent exponent(Given<C, Score> &given) const { return {*this, given}; }
};

} // namespace strobe::sm90
