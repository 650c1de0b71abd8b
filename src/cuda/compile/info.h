#pragma once
#include <string>

namespace strobe::cuda {

// The CUDA lines of `strobe info`: driver, GPUs, NVRTC, cache; or the reason why one is missing.
std::string info();

} // namespace strobe::cuda
