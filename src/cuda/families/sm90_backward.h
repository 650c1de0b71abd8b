// The backward of the Hopper family.
#pragma once
#include "cuda/program/engine.h"

namespace strobe::cuda {

CudaEngine::Made sm90_backward(const Problem &, const Device &, Scratch &);

} // namespace strobe::cuda
