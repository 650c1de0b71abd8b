// The list of CUDA engines, and what is done with all of them.
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

// Compiles, or finds in the cache, the kernels that the problem would run on a GPU of this compute capability; needs none. Throws with
// every engine's reason if none takes it. A line per kernel: "compiled|cached registers spilled-bytes wgmma-serialized name".
std::string prewarm(const Problem &, Direction, int cc);
// Their names, and whether a cache has them; nothing is compiled.
std::string kernels(const Problem &, Direction, int cc);

} // namespace strobe::cuda
