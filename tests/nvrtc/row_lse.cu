#include "ptx/math.h"

extern "C" __global__ void kernel(float *x) { *x = strobe::row_lse(x[0], x[1], x[2]); }
