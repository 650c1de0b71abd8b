// Arithmetic in the kernel's real type.
#pragma once
#include "../attention/arguments.h"
#include "../attention/features.h"
#include "../ptx/math.h"

namespace strobe::simt {

// Of a number and not a number: the number.
__device__ __forceinline__ float maximum(float a, float b) { return ::fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return ::fmax(a, b); }

} // namespace strobe::simt
