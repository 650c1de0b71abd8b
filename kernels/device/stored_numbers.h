// Numbers of quantised K and V by words, as they are dequantised to 16 bits: x * scale in FP32, rounded once.
#pragma once
#include "../attention/features.h"
#include "../ptx/math.h"
#include "../ptx/mma.h"

namespace strobe {

STROBE_FN constexpr int numbers_of_word(i32 stored) { return stored == kInt4 ? 8 : 4; }
// Constants that the compiler does not know. If it knew them, it would load each into a register again for each use.
template <i32 kStored> struct Magic {};
template <> struct Magic<kInt4> {
  u32 at[5]; // 2^(23 - n) + 8, where a number's four bits lie from bit n = 4 i of the fraction on
  __device__ __forceinline__ Magic() {
#pragma unroll
    for (int i = 0; i < 5; ++i) at[i] = computed_here((i32)((u32)(150 - 4 * i) << 23 | 8u << 4 * i));
  }
};
// The numbers that a word stores, by column.
template <i32 kStored>
__device__ __forceinline__ void stored_numbers(u32 word, float (&x)[numbers_of_word(kStored)], const Magic<kStored> &magic) {
  if constexpr (kStored == kInt8) { // 2^23 + 128 + x
    const u32 y = word ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(__byte_perm(y, 0x4B000000u, 0x7650u + i)) - 8388736.0f;
  } else if constexpr (kStored == kInt4) { // 2^(23 - n) + 8 + x
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = i < 5 ? i : i - 3;
      x[i] = __uint_as_float(and_xor(i < 5 ? word : word >> 12, 15u << 4 * n, magic.at[n])) - (float)((1 << (23 - 4 * n)) + 8);
    }
  } else if constexpr (kStored == kE5M2) { // the upper byte of an FP16 number
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = to_float(f16{(unsigned short)((i % 2 ? word : word << 8) >> 16 * (i / 2) & 0xFF00u)});
  } else {
    u32 pairs[2];
    pairs_of_e4m3(word, pairs[0], pairs[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = to_float(f16{(unsigned short)(pairs[i / 2] >> 16 * (i % 2))});
  }
}

// Eight adjacent numbers, in one word or two, times their scales: four pairs of T.
template <class T, i32 kStored>
__device__ __forceinline__ void dequantise_eight(const u32 (&words)[8 / numbers_of_word(kStored)], const float (&by)[8], u32 (&pairs)[4],
                                                 const Magic<kStored> &magic) {
  constexpr int kWord = numbers_of_word(kStored);
  float x[8];
#pragma unroll
  for (int n = 0; n < 8 / kWord; ++n) {
    float some[kWord];
    stored_numbers<kStored>(words[n], some, magic);
#pragma unroll
    for (int i = 0; i < kWord; ++i) x[kWord * n + i] = some[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = pack<T>(rounded_product(x[2 * i], by[2 * i]), rounded_product(x[2 * i + 1], by[2 * i + 1]));
}

} // namespace strobe
