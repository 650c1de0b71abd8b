// The bulk copy engine (TMA, sm_90): boxes of tensors from global to shared memory.
#pragma once
#include "tensor_map.h"

namespace strobe {

__device__ __forceinline__ void tma_prefetch(const TensorMap &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// The box at (column, row, head, batch). Completes on the barrier with the bytes of the whole box: what lies outside the tensor is zero.
__device__ __forceinline__ void tma_load(u32 shared, const TensorMap &map, u32 barrier, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// What this thread has written to shared memory is there for the copy engine and wgmma.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

} // namespace strobe
