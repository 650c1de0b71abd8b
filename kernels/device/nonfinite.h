// Infinities and NaN must not reach queries that do not see them. A P or dS of 0 does not keep them out, because 0 times such a number is
// NaN. So where something is hidden, these numbers are replaced by 0 in the tiles, and their effect on the queries that do see them is
// added separately. The code for 16 bits comes first, then the code for FP32 by TF32.
#pragma once
#include "../tile/shared.h"
#include "../tile/tf32_multiply.h"
#include "keys.h"
#include "scores.h"

namespace strobe {

template <class T> struct ExponentBits; // the exponent bits of a pair, and the lowest exponent bit of each half
template <> struct ExponentBits<bf16> {
  static constexpr u32 kBits = 0x7F807F80, kUnit = 0x00800080, kOnes = 0x3F803F80;
};
template <> struct ExponentBits<f16> {
  static constexpr u32 kBits = 0x7C007C00, kUnit = 0x04000400, kOnes = 0x3C003C00;
};

// The sign bits of the halves that are not finite. (An exponent of all ones carries into the sign.)
template <class T> __device__ __forceinline__ u32 nonfinite(u32 pair) {
  return ((pair & ExponentBits<T>::kBits) + ExponentBits<T>::kUnit) & 0x80008000u;
}
// All bits of the halves whose sign bit is set.
__device__ __forceinline__ u32 spread(u32 signs) { return (signs >> 15) * 0xFFFFu; }

// Splits y into two operands. Finite numbers stay in y and become 0 in the result; other numbers become 0 in y and 1 in the result.
template <class T, class Operand> __device__ __forceinline__ Operand split_nonfinite(Operand &y) {
  Operand flags;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 bad = spread(nonfinite<T>(y.x[i]));
    flags.x[i] = bad & ExponentBits<T>::kOnes;
    y.x[i] &= ~bad;
  }
  return flags;
}

// An operand with 1 where x is not 0, and 0 elsewhere.
template <class T> __device__ __forceinline__ tile::Left nonzero(tile::Left x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 magnitude = x.x[i] & 0x7FFF7FFFu; // 0x7FFF plus a magnitude other than 0 sets the sign bit
    x.x[i] = spread((magnitude + 0x7FFF7FFFu) & 0x80008000u) & ExponentBits<T>::kOnes;
  }
  return x;
}

// Makes elements of d NaN where `count` is not 0.
__device__ __forceinline__ void make_nonfinite(tile::Accumulator &d, const tile::Accumulator &count) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (count.x[i / 4][i % 4] > 0) d.x[i / 4][i % 4] = __int_as_float(0x7FC00000);
  }
}

// Whether a number is not finite among the bytes at base (a multiple of 16) that this thread reads.
template <class T> __device__ __forceinline__ bool any_nonfinite(u32 base, int bytes, int thread, int threads) {
  u32 found = 0;
#pragma unroll 1
  for (int i = 16 * thread; i < bytes; i += 16 * threads) {
    u32 x[4];
    load_shared(x, base + i);
    found |= nonfinite<T>(x[0]) | nonfinite<T>(x[1]) | nonfinite<T>(x[2]) | nonfinite<T>(x[3]);
  }
  return found != 0;
}

// The following functions serve V in the forward.

// Clears numbers that are not finite in this thread's chunks of a tile of V in shared memory. Returns whether any was cleared.
template <class T, int kRows, int kColumns, int kThreads> __device__ __forceinline__ bool clear_nonfinite(u32 v, int thread) {
  constexpr int kChunks = kRows * kColumns / 8;
  u32 any = 0;
#pragma unroll 2
  for (int i = 0; i < kChunks; i += kThreads) { // a warp's threads must not diverge here: divergence would cost the main loop registers
    u32 x[4], bad[4], place = v + 16 * min(i + thread, kChunks - 1);
    load_shared(x, place);
#pragma unroll
    for (int w = 0; w < 4; ++w) bad[w] = nonfinite<T>(x[w]);
    u32 here = bad[0] | bad[1] | bad[2] | bad[3];
    if (__any_sync(0xFFFFFFFFu, here)) {
#pragma unroll
      for (int w = 0; w < 4; ++w) x[w] &= ~spread(bad[w]);
      store_shared(place, x);
    }
    any |= here;
  }
  return any;
}

// Adds V's numbers that are not finite to the results, which are in memory. kThreads threads call it; `thread` is the calling thread's
// number. rows has count, query(row), head(row) and add(row, column, x). keys: the keys that the main loop walked over; with block sparsity
// only those in kept blocks count. v: the V of this head, in global memory.
template <int kThreads, Features F, Functions kFunctions, class KeysOfHead, class Rows>
__device__ __forceinline__ void add_nonfinite(const Scores<F, float, kFunctions> &scores, const Dropout<F> &dropout, const KeysOfHead &v,
                                              Range keys, BlockRow blocks, Rows rows, int thread) {
  const Inputs &in = scores.in;
#pragma unroll 1
  for (i32 j = (i32)keys.begin; j < (i32)keys.end; ++j) {
    if (F.blocks && !blocks.keeps(j)) continue;
    if (lacks(v, j)) continue;
#pragma unroll 1
    for (i32 c = thread; c < in.head_dim_v; c += kThreads) {
      float x = to_float(v.at(j, c));
      if (x - x == 0) continue;
#pragma unroll 1
      for (i32 r = 0; r < rows.count; ++r) {
        auto row = scores.row(rows.query(r), rows.head(r));
        if (scores.score(0.0f, row, j, true, scores.seqlen_k) == minus_infinity<float>()) continue;
        rows.add(r, c, dropout.keep(scores.b, row.h, row.i, j) ? x : x - x);
      }
    }
  }
}

// FP32 by TF32. Infinities, NaN, and numbers that TF32 rounds to infinity become NaN when they are split into hi and lo. They are rare, so
// the work is first done with them, and repeated without them if a result is not finite.

__device__ __forceinline__ bool finite_tf32(float x) {
  return fabsf(x) < __int_as_float(0x7F7FF000);
} // whether x is finite after rounding to TF32

// Which elements of S are visible: a word for each of a lane's rows. Bit 4n + 2c + e is a column that the lane holds.
template <int kM, int kN> struct Seen {
  static_assert(4 * kN <= 32);
  u32 bits[kM][2];
  __device__ __forceinline__ explicit Seen(const tile::Accumulator (&S)[kM][kN]) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      int m = i / 2, r = i % 2;
      bits[m][r] = 0;
#pragma unroll
      for (int k = 0; k < 4 * kN; ++k) bits[m][r] |= (u32)(S[m][k / 4].x[k / 2 % 2][2 * r + k % 2] != minus_infinity<float>()) << k;
    }
  }
};

// Clears numbers that are not finite among kRows x kColumns elements. A barrier must come before and after.
template <int kRows, int kColumns, int kThreads> __device__ __forceinline__ void clear_nonfinite_tf32(u32 base, int thread) {
#pragma unroll 1
  for (int i = thread; i < kRows * kColumns; i += kThreads) {
    float x = load_shared_float(base + 4 * i);
    if (!finite_tf32(x)) store_shared(base + 4 * i, 0);
  }
}

// Adds those numbers of the matrix B that are not finite to d, in the rows that see them. seen: Seen::bits of the left operand.
template <int kM, int kC, class Rows>
__device__ __forceinline__ void add_nonfinite_tf32(tile::Accumulator (&d)[kM][kC], const u32 (&seen)[kM][2], const Rows &B) {
#pragma unroll 1
  for (int j = 0; j < B.rows; ++j) {
    bool sees[kM][2];
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i)
      sees[i / 2][i % 2] = __shfl_sync(0xFFFFFFFFu, seen[i / 2][i % 2], (tile::lane_id() & 28) + j % 8 / 2) >> (j / 8 * 2 + j % 2) & 1;
#pragma unroll
    for (int k = 0; k < 4 * kC; ++k) {
      int column = 32 * (k / 8) + tile::tf32::first_column() + k % 8;
      float x = column < B.columns ? B.row(j)[column * B.column_stride] : 0;
      if (finite_tf32(x)) continue;
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        if (sees[i / 2][i % 2]) tile::tf32::element(d, i / 2, i % 2, k / 8, k % 8) += x * -minus_infinity<float>();
      }
    }
  }
}

} // namespace strobe
