// Arithmetic in the kernel's real type.
#pragma once
#include "../attention/arguments.h"
#include "../attention/features.h"
#include "../ptx/math.h"

namespace strobe::simt {

// The larger of two numbers. If one of them is NaN, the other one.
__device__ __forceinline__ float maximum(float a, float b) { return ::fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return ::fmax(a, b); }

} // namespace strobe::simt
