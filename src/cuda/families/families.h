// The list of CUDA engines.
#pragma once
#include "cuda/program/engine.h"

namespace strobe {
std::vector<const Engine *> cuda_engines(); // from the fastest family to the slowest
}

namespace strobe::cuda {

const CudaEngine &sm90_engine();
const CudaEngine &mma_engine();
const CudaEngine &tf32_engine();
const CudaEngine &simt_engine();

} // namespace strobe::cuda
