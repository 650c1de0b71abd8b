// Copies lists with gaps (attention/lists.h) into the workspace, where their integers are contiguous.
#pragma once
#include "../attention/lists.h"
#include "config.h"

namespace strobe::passes {

template <ListsConfig C> struct CopyLists {
  using Arguments = ListArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    for (i32 n = 0; n < a.count; ++n) {
      const ListCopy &list = a.lists[n];
      const u32 count = list.size[0] * list.size[1] * list.size[2];
      for (u32 i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
        const u32 row = i / list.size[2], column = i % list.size[2];
        const i64 at = row / list.size[1] * list.stride[0] + row % list.size[1] * list.stride[1] + column * list.stride[2];
        if (list.wide)
          ((i64 *)list.to)[i] = ((const i64 *)list.from)[at];
        else
          ((i32 *)list.to)[i] = ((const i32 *)list.from)[at];
      }
    }
  }
};

} // namespace strobe::passes
