// Makes dS from dP, for 64 keys x a tile of queries, in the registers of a warpgroup of the Hopper backward.
#pragma once
#include "../../attention/features.h"
#include "../../ptx/mma.h"
#include "../accumulator.h"

namespace strobe::sm90 {

// How dS becomes 0 where P is 0. There dP may be NaN because of a hidden V, and D because of a V that the row sees.
enum class Zeros {
  none,  // nothing is hidden
  each,  // each P is compared with 0
  pairs, // a bit mask, made of each pair of rounded P, clears elements of dS
};

// dS = P (dP - D). P.take(i) loads the lane's elements from 8 i on; P.at(i) is element i, negative if dropped; P.pair(i) has the elements 2
// i and 2 i + 1, rounded. delta: the address of D of the lane's first two queries. factor: by how much dropout scales the elements that it
// keeps.
template <Features F, Zeros kZeros, class T, int kM, class Probabilities>
__device__ __forceinline__ void differentiate(LeftOperand<kM> &dS, const Accumulator<T, kM> &dP, Probabilities P, u32 delta, float factor) {
#pragma unroll
  for (int i = 0; i < kM / 8; ++i) {
    if (i % 2 == 0) P.take(i / 2);
    float D[2];
    load_shared(D, delta + 32 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto dS_of = [&](int e) {
        const int at = 4 * i + 2 * r + e;
        const float p = P.at(at);
        if (kZeros == Zeros::each && p == 0) return 0.0f;
        if constexpr (F.dropout) return fabsf(p) * ((__float_as_uint(p) >> 31 ? 0.0f : dP.x[at] * factor) - D[e]);
        return p * (dP.x[at] - D[e]);
      };
      const int n = 2 * i + r;
      dS.x[n] = pack<T>(dS_of(0), dS_of(1));
      if constexpr (kZeros == Zeros::pairs) dS.x[n] &= nonzero_pairs<T>(P.pair(n));
    }
  }
}

} // namespace strobe::sm90
