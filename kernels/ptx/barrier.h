// Barriers among some warps of a block (1 ... 15; 0 is __syncthreads), reductions in global memory, and the counters of deterministic
// turns.
#pragma once
#include "../attention/base.h"

namespace strobe {

// threadIdx.x, read again each time, so that no value derived from it stays in registers around a loop.
__device__ __forceinline__ int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// barrier_sync arrives, and waits until `threads` threads have arrived. barrier_arrive arrives without waiting.
__device__ __forceinline__ void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Barrier 0 for `threads` threads. Returns whether the condition was true for any of them.
__device__ __forceinline__ bool barrier_any(bool condition, int threads) {
  int any;
  asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %1, 0; bar.red.or.pred q, 0, %2, p; selp.b32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"((int)condition), "r"(threads)
               : "memory");
  return any != 0;
}

// Every lane adds its number i to base[quad(lane, i)], i < 4: 512 bytes per warp.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ int quad(int lane, int i) { return 4 * lane + i; }
__device__ __forceinline__ void add_quad(float *base, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(base + quad((int)(threadIdx.x & 31), 0)), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
#else
__device__ __forceinline__ int quad(int lane, int i) { return 32 * i + lane; }
__device__ __forceinline__ void add_quad(float *base, const float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(base + quad((int)(threadIdx.x & 31), i)), "f"(x[i]) : "memory");
}
#endif

// p[0] += x, p[1] += y, atomically; p is a multiple of 8 bytes.
__device__ __forceinline__ void add_pair(float *p, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p + 1), "f"(y) : "memory");
#endif
}

#if __CUDA_ARCH__ >= 700
__device__ __forceinline__ u32 load_acquire(const u32 *p) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ u32 load_relaxed(const u32 *p) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}
__device__ __forceinline__ void add_release(u32 *p, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
#else // this PTX version has no memory order except fences
__device__ __forceinline__ u32 load_acquire(const u32 *p) {
  const u32 x = *static_cast<const volatile u32 *>(p);
  __threadfence();
  return x;
}
__device__ __forceinline__ void add_release(u32 *p, u32 x) {
  __threadfence();
  atomicAdd(p, x);
}
#endif

} // namespace strobe
