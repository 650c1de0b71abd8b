// Tiles of quantised K and V in shared memory, as they are stored, and operands of mma.sync made from them. A row has the layout of a row
// with half as many 16-bit elements (shared.h). A word holds n numbers, four INT8 or FP8 or eight INT4, and becomes pairs of 16-bit
// numbers. Pair i holds number i in its low half and number i + n / 2 in its high half; with kConverted it holds the numbers 2 i and 2 i +
// 1.
#pragma once
#include "../attention/features.h"
#include "../ptx/math.h"
#include "shared.h"

namespace strobe::tile {

STROBE_FN constexpr int columns_of_word(i32 stored) { return stored == kInt4 ? 8 : 4; }

template <class T> inline constexpr bool kIsHalf = false;
template <> inline constexpr bool kIsHalf<f16> = true;

// A word with the lower 16 bits of x in both halves.
__device__ __forceinline__ constexpr u32 both(u32 x) { return x << 16 | x; }

// Converts a word to pairs of FP16 (T = f16) or BF16. A stored number x is converted by an exact fused multiply-add:
//   INT4, FP16  (1024 + (x + 8)) - 1032, or (1024 + 16 (x + 8)) / 16 - 72: x + 8 is put into bits of the power of two's fraction
//   INT4, BF16  (128 + (x + 8)) - 136
//   INT8, FP16  (1024 + (x + 128)) - 1152
//   INT8, BF16  (128 + the lower 7 bits of x) - (128, or 256 where x < 0): the fraction has 7 bits
//   E4M3        2^8 y, in BF16 2^120 y: y has x's sign, exponent and fraction, each at its place; the exponents' biases differ
//   E5M2        in BF16 2^112 y. In FP16 x is the upper byte.
// E4M3's NaN becomes 480, and in BF16 E5M2's infinity and NaN become numbers from 2^16 on: see has_nan().
// zero: a 0 that the compiler does not know. If it knew, it would load each constant into a register again for each use.
template <class T, i32 kStored> __device__ __forceinline__ void pairs_of(u32 x, u32 (&pairs)[columns_of_word(kStored) / 2], u32 zero) {
  constexpr bool kHalf = kIsHalf<T>;
  constexpr u32 kOne = kHalf ? both(0x3C00) : both(0x3F80);
  if constexpr (kStored == kInt4 && kHalf) {
    constexpr u32 kPower = both(0x6400), kSixteenth = both(0x2C00);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const u32 y = x >> 4 * i;
      pairs[i] = multiply_add_pairs<T>((y & 0x000F000Fu) ^ (kPower + both(8) + zero), kOne, both(0xE408) + zero);
      pairs[i + 1] = multiply_add_pairs<T>((y & 0x00F000F0u) ^ (kPower + both(128) + zero), kSixteenth + zero, both(0xD480) + zero);
    }
  } else if constexpr (kStored == kInt4) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = multiply_add_pairs<T>((x >> 4 * i & 0x000F000Fu) ^ (both(0x4308) + zero), kOne, both(0xC308) + zero);
  } else if constexpr (kStored == kInt8 && kHalf) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      pairs[i] = multiply_add_pairs<T>((x >> 8 * i & 0x00FF00FFu) ^ (both(0x6480) + zero), kOne, both(0xE480) + zero);
  } else if constexpr (kStored == kInt8) { // bit 7 of x is the last exponent bit
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 y = x >> 8 * i;
      pairs[i] = multiply_add_pairs<T>((y & 0x00800080u) | (both(0x4300) + zero), both(0xBF80), (y & 0x007F007Fu) | (both(0x4300) + zero));
    }
  } else if constexpr (kStored == kE5M2 && kHalf) {
    pairs[0] = x << 8 & 0xFF00FF00u, pairs[1] = x & 0xFF00FF00u;
  } else if constexpr (kStored == kE5M2) {
    constexpr u32 kFields = both(0x0FE0), kUnit = both(0x7780); // 2^112
    const u32 low = (x << 5 & kFields) | (x << 8 & 0x80008000u), high = (x >> 3 & kFields) | (x & 0x80008000u);
    pairs[0] = multiply_add_pairs<T>(low, kUnit, both(0x8000)), pairs[1] = multiply_add_pairs<T>(high, kUnit, both(0x8000));
  } else {
    constexpr int kShift = kHalf ? 1 : 4; // FP16 has one more exponent bit, BF16 four
    constexpr u32 kFields = kHalf ? both(0x3F80) : both(0x07F0), kUnit = kHalf ? both(0x5C00) : both(0x7B80); // 2^8, 2^120
    const u32 low = (x << (8 - kShift) & kFields) | (x << 8 & 0x80008000u), high = (x >> kShift & kFields) | (x & 0x80008000u);
    pairs[0] = multiply_add_pairs<T>(low, kUnit, both(0x8000)), pairs[1] = multiply_add_pairs<T>(high, kUnit, both(0x8000));
  }
}

// KeyFactor: the 16-bit dtype as which K is multiplied if Q has dtype T. It is FP16 where FP16 takes fewer instructions. kConverted: newer
// GPUs convert FP8 to FP16, NaN included, with one instruction.
#if __CUDA_ARCH__ >= 900 || (__CUDA_ARCH__ >= 890 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201) // PTX 8.1
template <i32 kStored> inline constexpr bool kConverted = kStored == kE4M3;
#else
template <i32 kStored> inline constexpr bool kConverted = false;
#endif
template <class T, i32 kStored> struct KeyFactor {
  using type = T;
};
template <class T, i32 kStored>
  requires(kConverted<kStored> || kStored == kInt8 || kStored == kInt4 || kStored == kE5M2)
struct KeyFactor<T, kStored> {
  using type = f16;
};
template <class T, i32 kStored> __device__ __forceinline__ void pairs_of_key(u32 x, u32 (&pairs)[columns_of_word(kStored) / 2], u32 zero) {
  if constexpr (kConverted<kStored>) // adjacent numbers
    pairs_of_e4m3(x, pairs[0], pairs[1]);
  else
    pairs_of<typename KeyFactor<T, kStored>::type, kStored>(x, pairs, zero);
}

// Bit 7 of each byte of the result says whether that byte of x is FP8's NaN or infinity. The results for several words are joined by |.
template <i32 kStored> inline constexpr bool kHasNan = kStored == kE4M3 || kStored == kE5M2;
template <i32 kStored> __device__ __forceinline__ u32 nan_bits(u32 x) {
  return kHasNan<kStored> ? (x & 0x7F7F7F7Fu) + (kStored == kE5M2 ? 0x04040404u : 0x01010101u) : 0;
}
__device__ __forceinline__ bool has_nan(u32 bits) { return (bits & 0x80808080u) != 0; }

// Which column of K the lanes with t = lane % 4 multiply in step c as number e of half h, in rows of kColumns. These lanes hold a quarter
// of a row of K. The sum over columns may take the columns in any order.
template <i32 kStored, int kColumns> __device__ __forceinline__ int column_of_step(int t, int c, int h, int e) {
  constexpr int kWord = columns_of_word(kStored), kSteps = kWord / 4; // steps per word
  return kColumns / 4 * t + c / kSteps * kWord + c % kSteps * 2 + (kConverted<kStored> ? 2 * h + e : h + e * kWord / 2);
}
// Loads Q as the left operand of step c, from a tile of 16-bit numbers at `base`.
template <i32 kStored, int kColumns> __device__ __forceinline__ Left left_of_steps(u32 base, int row, int c) {
  Left f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 x[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = column_of_step<kStored, kColumns>(lane_id() % 4, c, i / 2, e);
      const u32 pair = load_shared(base + Layout<kColumns>::offset(row + lane_row(i % 2), column / 8) + column % 8 / 2 * 4);
      x[e] = column % 2 ? pair >> 16 : pair & 0xFFFF;
    }
    f.x[i] = x[1] << 16 | x[0];
  }
  return f;
}

// Rows of K, loaded as right operands.
template <i32 kStored, int kColumns> class StoredRows {
  static constexpr int kBytes = kStored == kInt4 ? kColumns / 2 : kColumns, kShare = kBytes / 4; // bytes per row; and per lane
  using L = Layout<kBytes / 2>;
  static_assert(kShare % 8 == 0);
  u32 at_[kShare / 8];

public:
  static constexpr int kWords = kShare / 4, kSteps = kColumns / 16;
  __device__ __forceinline__ explicit StoredRows(u32 base) {
#pragma unroll
    for (int i = 0; i < kShare / 8; ++i) {
      const int byte = lane_id() % 4 * kShare + 8 * i;
      at_[i] = base + L::offset(lane_id() / 4, byte / 16) + byte % 16;
    }
  }
  // Loads this lane's words of one row: row lane / 4 of the eight rows from `row` on. row: a multiple of 8.
  __device__ __forceinline__ void load(u32 (&words)[kWords], int row) const {
#pragma unroll
    for (int i = 0; i < kShare / 8; ++i) load_shared(words[2 * i], words[2 * i + 1], at_[i] + row * L::kPitch);
  }
};

// The column of V of number n in half h of accumulator a of O.
template <i32 kStored> __device__ __forceinline__ int column_of_sum(int a, int h, int n) {
  return kStored == kInt4 ? 32 * (a / 2) + 4 * n + 2 * (a % 2) + h : 16 * a + 2 * n + h;
}

} // namespace strobe::tile
