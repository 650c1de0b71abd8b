// Launches that overlap: a thread block may begin before the launch before its own has ended (src/cuda/compile/build.cpp).
#pragma once

namespace strobe {

// Waits until the launch before this one has ended, and with it all before: then what they wrote can be read.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

} // namespace strobe
