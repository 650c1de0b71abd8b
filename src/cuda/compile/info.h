#pragma once
#include <string>

namespace strobe::cuda {

// What `strobe info` says of CUDA: driver, GPUs, NVRTC, cache; or why there is none.
std::string info();

} // namespace strobe::cuda
