// The backward of the mma family.
#pragma once
#include "cuda/engine.h"

namespace strobe::cuda {

// scores: that are visible by position and blocks, for the prediction.
CudaEngine::Made mma_backward(const Problem &, const Device &, Scratch &, double scores);

} // namespace strobe::cuda
