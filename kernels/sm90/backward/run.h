// The roles of a thread block of the Hopper backward: threads of the first warpgroup load (and order additions to dQ), the others compute.
#pragma once
#include "load.h"
#include "order.h"

namespace strobe::sm90 {

template <BackwardConfig C, class Compute> __device__ __forceinline__ void run_backward(const HopperBackwardArguments &a) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  const BackwardShared<C> shared(shared_address(dynamic));
  if (threadIdx.x == 0) {
    shared.begin();
    if constexpr (C.deterministic || C.features.part) wait_for_launch_before(); // for the ticket and the table of ranges
    BackwardLoad<C>::choose_keys(a, shared);
  }
  if (threadIdx.x == 32) {
    tma_prefetch(a.tma_k.map), tma_prefetch(a.tma_q.map), tma_prefetch(a.tma_v.map), tma_prefetch(a.tma_dout.map);
    if constexpr (C.bias_by_tma) tma_prefetch(a.tma_bias.map);
  }
  __syncthreads();
  if constexpr (!C.owns_dq) {
    const bool some = there(read<KeyBlock>(shared.keys()));
    if constexpr (C.persistent) __syncthreads(); // the next keys will be written to the same place
    if (!some) return wait_for_launch_before();
  }
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_lower<C.registers_load>();
    if (threadIdx.x == 0) BackwardLoad<C>{a, shared}.q();
    if (threadIdx.x == 32) BackwardLoad<C>{a, shared}.dout();
    if constexpr (C.deterministic) {
      if (threadIdx.x == 64) BackwardOrder<C>{a, shared, 0}.all();
      if (threadIdx.x == 96) BackwardOrder<C>{a, shared, 1}.all();
    }
  } else {
    registers_raise<C.registers_compute>();
    u32 n = 0;
    if constexpr (C.in_line) {
      typename Compute::Carried carried{shared};
#pragma unroll 1
      do {
        const BackwardShared<C> at = shared.at(n);
        n = Compute(a, at, read<KeyBlock>(at.keys()), warpgroup - 1, carried).all(n);
      } while (carried.more);
    } else {
#pragma unroll 1
      do {
        const BackwardShared<C> at = shared.at(n);
        n = Compute(a, at, read<KeyBlock>(at.keys()), warpgroup - 1).all(n);
      } while (other_keys<C>(shared, n));
    }
  }
}

} // namespace strobe::sm90
