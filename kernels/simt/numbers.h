// Arithmetic in the kernel's real type.
#pragma once
#include "../attention/arguments.h"
#include "../attention/features.h"
#include "../ptx/math.h"

namespace strobe::simt {

// Of a number and not a number: the number.
__device__ __forceinline__ float maximum(float a, float b) { return ::fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return ::fmax(a, b); }
// What a score of Scores is multiplied by to be a natural logarithm.
template <Features F, class T> __device__ __forceinline__ T natural(const Inputs &in) { return F.additive() ? T(1) : T(in.scale); }

} // namespace strobe::simt
