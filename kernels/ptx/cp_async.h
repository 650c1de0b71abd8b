// cp.async copies 16 bytes from global to shared memory without registers. If the source is marked as invalid, it is not read, and zeros
// are written. Before sm_80 the copy is synchronous.
#pragma once
#include "ldmatrix.h"

namespace strobe {

__device__ __forceinline__ void cp_async(u32 shared, const void *global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
#else
  u32 x[4] = {0, 0, 0, 0};
  if (valid)
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(global) : "memory");
  store_shared(shared, x);
#endif
}

// Makes all copies since the last commit a group.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most kPending of this thread's groups are in flight.
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

} // namespace strobe
