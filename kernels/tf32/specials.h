// Infinities and NaN in a right operand, and numbers that TF32 rounds to infinity, which count as such. What a row does not see must not
// reach it, but 0 * infinity would, and the split into hi and lo makes NaN of any infinity. They are rare: where a result is not finite,
// the work is done again with them set aside, as 0 in shared memory, and added for the rows that see them.
#pragma once
#include "multiply.h"

namespace strobe::tf32 {

__device__ __forceinline__ bool finite(float x) { return fabsf(x) < __int_as_float(0x7F7FF000); } // as TF32

// Of the columns of a warp's S that this lane holds, in a row of its: which it sees. Bit 4n + 2c + e.
template <int kM, int kN> struct Seen {
  static_assert(4 * kN <= 32);
  u32 bits[kM][2];
  __device__ __forceinline__ explicit Seen(const Accumulator (&S)[kM][kN]) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      int m = i / 2, r = i % 2;
      bits[m][r] = 0;
#pragma unroll
      for (int k = 0; k < 4 * kN; ++k) bits[m][r] |= (u32)(S[m][k / 4].x[k / 2 % 2][2 * r + k % 2] != minus_infinity<float>()) << k;
    }
  }
};

// In kRows x kColumns elements; between barriers.
template <int kRows, int kColumns, int kThreads> __device__ __forceinline__ void drop_specials(u32 base, int thread) {
#pragma unroll 1
  for (int i = thread; i < kRows * kColumns; i += kThreads) {
    float x = load_shared_float(base + 4 * i);
    if (!finite(x)) store_shared(base + 4 * i, 0);
  }
}

// d += what is not finite in the matrix B, for the rows that see it. seen: of a lane's rows, which of its columns of the left operand, bit
// 4n + 2c + e.
template <int kM, int kC>
__device__ __forceinline__ void add_specials(Accumulator (&d)[kM][kC], const u32 (&seen)[kM][2], const tile::Matrix<const float> &B) {
#pragma unroll 1
  for (int j = 0; j < B.rows; ++j) {
    bool sees[kM][2];
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i)
      sees[i / 2][i % 2] = __shfl_sync(0xFFFFFFFFu, seen[i / 2][i % 2], (tile::lane_id() & 28) + j % 8 / 2) >> (j / 8 * 2 + j % 2) & 1;
#pragma unroll
    for (int k = 0; k < 4 * kC; ++k) {
      int column = 32 * (k / 8) + first_column() + k % 8;
      float x = column < B.columns ? B.row(j)[column * B.column_stride] : 0;
      if (finite(x)) continue;
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        if (sees[i / 2][i % 2]) element(d, i / 2, i % 2, k / 8, k % 8) += x * -minus_infinity<float>();
      }
    }
  }
}

} // namespace strobe::tf32
