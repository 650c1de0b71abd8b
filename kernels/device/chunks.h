// Chunks of keys begin at fixed places, and their results are merged in ascending order, so that a row's bits do not depend on which thread
// block computes which chunk. (`invariant` in a Config asks for chunks; it is not one of the Features.)
#pragma once
#include "../attention/base.h"
#include "../ptx/math.h"

namespace strobe {

// Merges two results over different keys, each a normalised O with its natural LSE, into before * x + now * y. If one of the results saw no
// key, the other one keeps its bits.
struct Merge {
  float lse, before, now;
  bool keep, take; // keep: only the earlier result x counts; take: only the new result y counts

  // a, b: the LSE of x and of y. precise: for a sink that may be far above O's LSE; an error of O's weight is then an error of all of O.
  __device__ __forceinline__ Merge(float a, float b, bool precise = false)
      : lse(a), before(1), now(0), keep(b == minus_infinity<float>()), take(false) {
    if (keep) return;
    take = a == minus_infinity<float>();
    lse = b, before = 0, now = 1;
    if (take) return;
    const float top = fmaxf(a, b);
    const auto weight = [&](float z) {
      return precise ? probability(z, 1.0f, top, 0.0f) : exp2(__fmul_rn(__fsub_rn(z, top), kLog2e<float>));
    };
    const float x = weight(a), y = weight(b);
    const float sum = __fadd_rn(x, y);
    lse = row_lse(top, 1.0f, sum), before = __fdiv_rn(x, sum), now = __fdiv_rn(y, sum);
  }
  __device__ __forceinline__ float operator()(float x, float y) const {
    return __fmaf_rn(take ? -0.0f : x, before, keep ? -0.0f : __fmul_rn(y, now)); // adding -0 changes nothing
  }
  // Merges results that already hold infinities and NaN from V. These stay, however small the weight of their chunk.
  __device__ __forceinline__ float of_any(float x, float y) const {
    if (x - x + (y - y) == 0) return (*this)(x, y);
    return keep ? x : take ? y : x + y;
  }
};

} // namespace strobe
