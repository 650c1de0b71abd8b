// The forward of latent attention on Hopper (kernels/sm90/latent).
#pragma once
#include "attention/latent.h"
#include "cuda/program/engine.h"

namespace strobe::cuda {

CudaEngine::Made sm90_latent(const Problem &, const Device &, Scratch &);

} // namespace strobe::cuda
