// The bulk copy engine (TMA, sm_90): boxes of tensors between global and shared memory, as a tensor map says. Coordinates begin with the
// innermost axis.
#pragma once
#include "../attention/base.h"

namespace strobe {

// A CUtensorMap, encoded by the host, passed as a __grid_constant__.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ void tma_prefetch(const TensorMap &map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Completes on the barrier with the bytes of the whole box: what lies outside the tensor is filled with zeros.
__device__ __forceinline__ void tma_load(u32 shared, const TensorMap &map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
                   shared),
               "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
// What lies outside the tensor is not written. Part of the thread's current bulk group.
__device__ __forceinline__ void tma_store(const TensorMap &map, u32 shared, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map), "r"(shared), "r"(c0),
               "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's bulk groups have not been read (their shared memory may be written again).
template <int kPending> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending> __device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory"); }

// Ordinary writes to shared memory before this are seen by the copy engine and the tensor cores after it.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

} // namespace strobe
