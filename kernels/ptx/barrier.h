// Barriers among some warps of a block (1 ... 15; 0 is __syncthreads), reductions in global memory, and turns between blocks.
#pragma once
#include "../attention/base.h"

namespace strobe {

// Waits until `threads` threads have come; `arrive` comes without waiting.
__device__ __forceinline__ void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// *p += x, 16 bytes aligned
__device__ __forceinline__ void add_global(float *p, float x0, float x1, float x2, float x3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x0), "f"(x1), "f"(x2), "f"(x3) : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x0) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p + 1), "f"(x1) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p + 2), "f"(x2) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p + 3), "f"(x3) : "memory");
#endif
}

__device__ __forceinline__ u32 load_acquire(const u32 *p) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(u32 *p, u32 x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

} // namespace strobe
