// Kernels compiled ahead, for GPUs that need not be present.
#pragma once
#include <string>

#include "attention/attention.h"

namespace strobe::cuda {

// Compiles, or finds in the cache, the kernels that the problem would run on a GPU of this compute capability; needs no GPU. Throws with
// every engine's reason if none supports it. One line per kernel: "compiled|cached registers spilled-bytes wgmma-serialized name".
std::string prewarm(const Problem &, Direction, int cc);
// The names of the same kernels, and whether a cache has them; nothing is compiled.
std::string kernels(const Problem &, Direction, int cc);

} // namespace strobe::cuda
