// Types and functions for all files that host and device share. No standard or CUDA header is included, so that NVRTC compiles these files
// unchanged. On the host, the translation unit of each instruction set defines STROBE_ISA, so that it shares no inline function with
// another unit.
#pragma once

#if defined(__CUDACC__)
#define STROBE_FN __host__ __device__ __forceinline__
#else
#define STROBE_FN inline __attribute__((always_inline))
#endif
#ifndef STROBE_ISA
#define STROBE_ISA portable
#endif

namespace strobe::inline STROBE_ISA {

using u8 = unsigned char;
using u32 = unsigned int;
using i32 = int;
using i64 = long long;
using u64 = unsigned long long;

// ln 2 and log2 e.
template <class T> inline constexpr T kLog2e = T(1.4426950408889634074);
template <class T> inline constexpr T kLn2 = T(0.69314718055994530942);

template <class T> STROBE_FN constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> STROBE_FN constexpr T max(T a, T b) { return a < b ? b : a; }
STROBE_FN constexpr i64 div_up(i64 a, i64 b) { return (a + b - 1) / b; }
STROBE_FN constexpr i64 round_up(i64 a, i64 b) { return div_up(a, b) * b; }
STROBE_FN constexpr i64 round_down(i64 a, i64 b) { return a / b * b; }

// The first or the second of two types.
template <bool kFirst, class A, class B> struct Either {
  using type = A;
};
template <class A, class B> struct Either<false, A, B> {
  using type = B;
};

} // namespace strobe::inline STROBE_ISA
