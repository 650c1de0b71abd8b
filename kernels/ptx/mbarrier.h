// Barriers in shared memory that count arrivals and bytes (PTX mbarrier). Functions take their 32-bit addresses.
#pragma once
#include "barrier.h"

namespace strobe {

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the phase complete only after `bytes` more bytes have come from the copy engine.
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has completed. A fresh barrier is in phase 0, so a wait for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred done;\n"
               "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra WAIT;\n}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}
// Whether that phase has completed.
__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred done;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
               "selp.b32 %0, 1, 0, done;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Moves registers between warpgroups: a warpgroup that needs few gives back the rest, and one that needs many takes more. kRegisters:
// registers per thread from now on, a multiple of 8.
template <int kRegisters> __device__ __forceinline__ void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

} // namespace strobe
