// Atomic operations on global memory.
#pragma once
#include "../attention/base.h"

namespace strobe {

// If the 16 bytes at the address equal `before`, replaces them atomically and returns true. Otherwise `before` receives the bytes found
// (sm_90).
__device__ __forceinline__ bool compare_exchange(void *address, u64 (&before)[2], u64 low, u64 high) {
  u64 x = before[0], y = before[1];
  asm volatile("{\n.reg .b128 old, expected, wanted;\n"
               "mov.b128 expected, {%0, %1};\nmov.b128 wanted, {%3, %4};\n"
               "atom.relaxed.gpu.global.cas.b128 old, [%2], expected, wanted;\n"
               "mov.b128 {%0, %1}, old;\n}"
               : "+l"(before[0]), "+l"(before[1])
               : "l"(address), "l"(low), "l"(high)
               : "memory");
  return before[0] == x && before[1] == y;
}
#if __CUDA_ARCH__ >= 700
__device__ __forceinline__ u32 fetch_add(u32 *address, u32 x) {
  u32 y;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(y) : "l"(address), "r"(x) : "memory");
  return y;
}
__device__ __forceinline__ void add_to(i64 *address, i64 x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(x) : "memory");
}
__device__ __forceinline__ void raise_to(u64 *address, u64 x) { // to the larger of the two
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(x) : "memory");
}
#else // this PTX version has no memory orders
__device__ __forceinline__ u32 fetch_add(u32 *address, u32 x) { return atomicAdd(address, x); }
__device__ __forceinline__ void add_to(i64 *address, i64 x) { atomicAdd((u64 *)address, (u64)x); }
__device__ __forceinline__ void raise_to(u64 *address, u64 x) { atomicMax(address, x); }
#endif

} // namespace strobe
