// Arithmetic in the kernel's real type.
#pragma once
#include "../attention/arguments.h"
#include "../attention/features.h"
#include "../ptx/math.h"

namespace strobe::simt {

__device__ __forceinline__ float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ __forceinline__ double fma(double a, double b, double c) { return ::fma(a, b, c); }
// Of a number and not a number: the number.
__device__ __forceinline__ float maximum(float a, float b) { return ::fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return ::fmax(a, b); }

template <class T, class E> __device__ __forceinline__ T to_real(E x) {
  if constexpr (sizeof(E) == 8)
    return x;
  else
    return T(to_float(x));
}
// x, of which the compiler knows nothing: what is computed from it is not computed before, to wait in registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What a score of Scores is multiplied by to be a natural logarithm.
template <Features F, class T> __device__ __forceinline__ T natural(const Inputs &in) { return F.additive() ? T(1) : T(in.scale); }

} // namespace strobe::simt
