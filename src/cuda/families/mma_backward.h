// The backward of the mma family.
#pragma once
#include "cuda/program/engine.h"

namespace strobe::cuda {

CudaEngine::Made mma_backward(const Problem &, const Device &, Scratch &);
// A lower bound of what it predicts (CudaEngine::least_seconds_on).
double least_seconds_of_mma_backward(const Problem &, const Device &);

} // namespace strobe::cuda
