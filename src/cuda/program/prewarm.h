// Compiles kernels ahead, for GPUs that need not be present.
#pragma once
#include <string>

#include "attention/attention.h"

namespace strobe::cuda {

// Compiles the kernels that the problem would run on a GPU of this compute capability, or finds them in the cache; needs no GPU. If no
// engine supports the problem, throws with every engine's reason. Returns a line per kernel: "compiled|cached registers spilled-bytes
// wgmma-serialized name".
std::string prewarm(const Problem &, Operation, int cc);
// The names of these kernels, and whether a cache has them. Nothing is compiled.
std::string kernels(const Problem &, Operation, int cc);

} // namespace strobe::cuda
