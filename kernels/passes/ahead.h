// Computes the values that many pairs of the caller's functions share: one for each i, each j or each i - j, of each sequence and head
// that they depend on. Kernels read them in place of the operations (device/functions.h).
#pragma once
#include "../device/functions.h"
#include "ahead_config.h"

namespace strobe::passes {

template <AheadConfig C> struct ComputeAhead {
  using Arguments = Inputs;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;
  using T = typename Element<C.dtype>::real;
  using Of = CallersFunctions<C.features.program, C.features.program_high>;

  static __device__ __forceinline__ void run(const Inputs &in) { fill<0>(in); }

private:
  template <int kValue> static __device__ __forceinline__ void fill(const Inputs &in) {
    const CapturedOperand &x = in.function.captured[Of::slot_ahead(kValue)];
    using E = decltype(Of::template value_ahead<kValue, T>(in.function, PlaceOfPair{}));
    const u32 length = (u32)x.size[2];
    const u64 count = (u64)(x.size[0] * x.size[1]) * length;
    for (u64 n = (u64)blockIdx.x * kThreads + threadIdx.x; n < count; n += (u64)gridDim.x * kThreads) {
      const u32 line = (u32)(n / length);
      const i32 b = (i32)(line / (u32)x.size[1]), h = (i32)(line % (u32)x.size[1]), at = (i32)(n % length) + (i32)x.size[3];
      // Values past the ends are read, and not used.
      const i32 last_q = max((i32)in.seqlen_q - 1, 0), last_k = max((i32)in.seqlen_k - 1, 0);
      constexpr Along kAlong = Of::along(kValue);
      const i32 i = kAlong == Along::key ? 0 : min(max(at, 0), last_q);
      const i32 j = kAlong == Along::query ? 0 : min(max(kAlong == Along::key ? at : -at, 0), last_k);
      const i32 offset = (i32)in.sequence<C.features>(b).band.offset;
      E *const values = (E *)x.data + b * x.stride[0] + h * x.stride[1];
      values[at] = Of::template value_ahead<kValue, T>(in.function, PlaceOfPair{b, h, i, j, offset, {i, 0}, {j, 0}});
    }
    if constexpr (kValue + 1 < Of::kAhead) fill<kValue + 1>(in);
  }
};

} // namespace strobe::passes
