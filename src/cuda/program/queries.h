// Q in FP8, for families that read Q in 16 bits: a launch dequantises it into the workspace.
#pragma once
#include "attention/attention.h"
#include "cuda/driver/device.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// The launch that dequantises Q to p.dtype. From then on p reads that Q, which has no scales.
Launch dequantise_queries(Problem &p, Scratch &);
// The launch's predicted time.
double dequantising_q_seconds(const Problem &, const Device &);

} // namespace strobe::cuda
