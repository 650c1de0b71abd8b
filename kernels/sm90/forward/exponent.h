// Forms of the exponent (device/softmax.h) in Hopper's forward: options of the score that are a few multiply-adds are fused into the
// multiply-add that plain scores take.
#pragma once
#include "../../device/scores.h"
#include "../../device/softmax.h"
#include "../fast_form.h"
#include "config.h"
#include "given.h"

namespace strobe::sm90 {

// The exponent with ALiBi, a bias, or both: S stays q.k, and the exponent adds what the options add to scores.
template <Config C, class Score> struct Line {
  static constexpr Features F = C.features;
  static constexpr bool kApplies = (F.penalty || F.bias) && F.function == kLinear && !F.scaled && (!F.bias || C.bias_by_tma);
  const i32 offset, high; // the distance of query 0 and key 0; as in Score
  const float unit, full_slope;
  float slope, start; // for this tile: ALiBi's slope, and ALiBi's term at the lane's first row and column
  bool before;        // no key of the tile lies past its query: ALiBi's penalty then grows from tile to tile

  __device__ __forceinline__ Line(const Score &scores, float slope)
      : offset(scores.distance(0, 0)), high(scores.high), unit(scores.scale * kLog2e<float>),
        full_slope(__shfl_sync(0xFFFFFFFFu, slope * kLog2e<float>, 0)) {}

  // Begins a tile. s: S of the keys [begin, end) and the warp's queries from `row` on, before any element is hidden.
  template <int N> __device__ __forceinline__ void begin(float (&s)[N], i32 row, i32 begin, i32 end) {
    if constexpr (F.penalty) {
      const bool after = !(F.penalty & kSigned) && begin >= row + 15 + offset;
      before = end <= row + offset + 1;
      slope = after ? -full_slope : full_slope;
      const float first =
          (float)(begin + tile::lane_column(0, 0) - row - tile::lane_row(0) - offset); // how far the key lies past the query
      start = slope * first;
      if ((F.penalty & kSigned) || before || after || (F.band && high <= offset)) return;
      const float twice = __fdividef(-2 * slope, unit); // changes -(slope x) to -|slope x| for keys past their query
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(fmaxf(first + place(i), 0), twice, s[i]);
    }
  }
  // Column minus row, relative to the lane's first element.
  static __device__ __forceinline__ float place(int i) { return (float)(i / 4 * 8 + i % 2 - 8 * (i / 2 % 2)); }

  struct Exponent {
    const Line &line;
    Given<C, Score> &given;
    __device__ __forceinline__ float at(float s, int i, float c) const {
      given.bias.read(i);
      if constexpr (F.penalty) c = __fmaf_rn(line.slope, place(i), c);
      if constexpr (F.bias) c = __fmaf_rn(given.bias.at(i), kLog2e<float>, c);
      return __fmaf_rn(s, line.unit, c);
    }
    __device__ __forceinline__ float constant(float c) const { return F.penalty ? c + line.start : c; }
    __device__ __forceinline__ float comparable(float s, int i) const { return at(s, i, constant(0)); }
    __device__ __forceinline__ float top(float x) const { return x; }
    __device__ __forceinline__ float difference(float x) const { return x; }
  };
  __device__ __forceinline__ Exponent exponent(Given<C, Score> &given) const { return {*this, given}; }
};

} // namespace strobe::sm90
