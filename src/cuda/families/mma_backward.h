// The backward of the mma family.
#pragma once
#include "cuda/program/engine.h"

namespace strobe::cuda {

CudaEngine::Made mma_backward(const Problem &, const Device &, Scratch &);

} // namespace strobe::cuda
