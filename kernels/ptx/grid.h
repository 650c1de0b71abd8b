// Launches that overlap: a thread block may begin before the previous launch has ended (src/cuda/compile/build.cpp).
#pragma once

namespace strobe {

// Waits until the previous launch, and with it all earlier ones, has ended. Their results can then be read.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

} // namespace strobe
