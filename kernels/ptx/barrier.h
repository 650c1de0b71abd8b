// Barriers among some warps of a block (1 ... 15; 0 is __syncthreads), reductions in global memory, and turns between blocks.
#pragma once
#include "../attention/base.h"

namespace strobe {

// threadIdx.x, asked anew each time: nothing that follows from it is kept in registers around a loop.
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Waits until `threads` threads have come; `arrive` comes without waiting.
__device__ __forceinline__ void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// p[0] += x0, p[1] += x1; 8 bytes aligned
__device__ __forceinline__ void add_global(float *p, float x0, float x1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x0), "f"(x1) : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x0) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p + 1), "f"(x1) : "memory");
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
