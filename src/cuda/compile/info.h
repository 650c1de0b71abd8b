#pragma once
#include <string>

namespace strobe::cuda {

// The CUDA lines of `strobe info`: driver, GPUs, NVRTC, cache. A line gives the reason if one of these is missing.
std::string info();

} // namespace strobe::cuda
