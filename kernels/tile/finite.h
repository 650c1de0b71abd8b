// Infinities and NaN in 16-bit tiles. A product with a zero of P or dS would make NaN of what nobody sees.
#pragma once
#include "registers.h"

namespace strobe::tile {

template <class T> struct Exponent; // of a pair: where its bits are, and the lowest one
template <> struct Exponent<bf16> {
  static constexpr u32 kBits = 0x7F807F80, kUnit = 0x00800080, kOnes = 0x3F803F80;
};
template <> struct Exponent<f16> {
  static constexpr u32 kBits = 0x7C007C00, kUnit = 0x04000400, kOnes = 0x3C003C00;
};

// The sign bit of each half: it is not finite.
template <class T> __device__ __forceinline__ u32 not_finite(u32 pair) {
  return ((pair & Exponent<T>::kBits) + Exponent<T>::kUnit) & 0x80008000u;
}
// All bits of the halves whose sign bit is set.
__device__ __forceinline__ u32 spread(u32 signs) { return (signs >> 15) * 0xFFFFu; }

// Splits y: what is finite stays, the rest becomes 0 there and 1 in the result.
template <class T, class Operand> __device__ __forceinline__ Operand set_aside(Operand &y) {
  Operand flags;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 bad = spread(not_finite<T>(y.x[i]));
    flags.x[i] = bad & Exponent<T>::kOnes;
    y.x[i] &= ~bad;
  }
  return flags;
}

// 1 where x is not 0.
template <class T> __device__ __forceinline__ Left nonzero(Left x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 magnitude = x.x[i] & 0x7FFF7FFFu; // + 0x7FFF reaches the sign bit unless it is 0
    x.x[i] = spread((magnitude + 0x7FFF7FFFu) & 0x80008000u) & Exponent<T>::kOnes;
  }
  return x;
}

// d becomes NaN where something was counted.
__device__ __forceinline__ void spoil(Accumulator &d, const Accumulator &count) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (count.x[i / 4][i % 4] > 0) d.x[i / 4][i % 4] = __int_as_float(0x7FC00000);
  }
}

// Is there one among the bytes (a multiple of 16) at base? This thread's share.
template <class T> __device__ __forceinline__ bool any_not_finite(u32 base, int bytes, int thread, int threads) {
  u32 found = 0;
#pragma unroll 1
  for (int i = 16 * thread; i < bytes; i += 16 * threads) {
    u32 x[4];
    load_shared(x, base + i);
    found |= not_finite<T>(x[0]) | not_finite<T>(x[1]) | not_finite<T>(x[2]) | not_finite<T>(x[3]);
  }
  return found != 0;
}

} // namespace strobe::tile
