// Products of tiles of 16-bit elements in shared memory, by a warp.
#pragma once
#include "shared.h"

namespace strobe::tile {

// s += rows * transpose(columns). Both are kInner wide and given by their addresses in shared memory. kShort: compiled as a loop, for code
// that seldom runs.
template <class T, int kInner, bool kShort, int kM, int kN>
__device__ __forceinline__ void multiply(Accumulator (&s)[kM][kN], u32 rows, u32 columns) {
  auto step = [&](const Blocks<Left, kInner> &A, const Blocks<Right, kInner> &B, int column) {
    Left x[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) x[m] = A.load(16 * m, column);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      Right y = B.load(16 * n, column);
#pragma unroll
      for (int m = 0; m < kM; ++m) tile::multiply_add<T>(s[m][n], x[m], y);
    }
  };
  if constexpr (kShort) {
#pragma unroll 1
    for (int k = 0; k < kInner / 16; ++k) step(Blocks<Left, kInner>(rows, 16 * k), Blocks<Right, kInner>(columns, 16 * k), 0);
  } else {
    Blocks<Left, kInner> A(rows);
    Blocks<Right, kInner> B(columns);
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) step(A, B, 16 * k);
  }
}

} // namespace strobe::tile
