// The copy engine (TMA, sm_90): boxes of tensors from global to shared memory, and runs of bytes either way.
#pragma once
#include "tensor_map.h"

namespace strobe {

__device__ __forceinline__ void tma_prefetch(const TensorMap &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Elects one lane of a warp, the same one each time. All lanes must call it. Unlike after a comparison of lane numbers, the compiler knows
// that a single lane goes on, and makes no loop over lanes.
__device__ __forceinline__ bool elected() {
  int one;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.b32 %0, 1, 0, p; }" : "=r"(one)::"memory");
  return one != 0;
}

// Loads the box at (column, row, head, batch). The barrier receives the bytes of the whole box: elements outside the tensor are zero.
__device__ __forceinline__ void tma_load(u32 shared, const TensorMap &map, u32 barrier, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Copies bytes; addresses and sizes are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 shared, const void *global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// Adds floats of shared memory to those of global memory. The thread that wrote the floats must have called async_proxy_fence() since.
__device__ __forceinline__ void bulk_add(void *global, u32 shared, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_store(void *global, u32 shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// bulk_wait_read() waits until the copies that this thread committed have read shared memory; bulk_wait() until they are complete.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Makes this thread's writes to shared memory visible to the copy engine and to wgmma.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders this thread's earlier accesses to global memory before its later ones, across the generic proxy and the copy engine's proxy.
__device__ __forceinline__ void async_proxy_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

} // namespace strobe
