// Q in FP8, dequantised into the workspace for kernels that read 16 bits: x * scale in FP32, rounded once.
#pragma once
#include "../attention/quantised.h"
#include "../device/quantised.h"
#include "config.h"

namespace strobe::passes {

template <QueriesConfig C> struct DequantiseQueries {
  using Arguments = EightBitQueries;
  using T = typename Element<C.dtype>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  // A warp takes one row at a time, and a lane four columns.
  static __device__ __forceinline__ void run(const EightBitQueries &a) {
    const i64 rows = (i64)a.batch * a.heads * a.rows, step = (i64)gridDim.x * C.warps();
    const i32 lane = (i32)threadIdx.x % 32;
#pragma unroll 1
    for (i64 n = (i64)blockIdx.x * C.warps() + threadIdx.x / 32; n < rows; n += step) {
      const i64 line = n / a.rows, i = n - line * a.rows, b = line / a.heads, h = line - b * a.heads;
      const float scale = scale_at(a.scale.data, b * a.scale.stride[0] + h * a.scale.stride[1] + i * a.scale.stride[2], a.half != 0);
      const u8 *const from = a.from.at<const u8>(b, h, i, 0);
      T *const to = a.to.at<T>(b, h, i, 0);
#pragma unroll 1
      for (i32 c = 4 * lane; c < a.columns; c += 4 * 32) {
        u32 word = 0;
        if constexpr (C.words) {
          word = *(const u32 *)(from + c);
        } else {
          for (i32 k = 0; k < 4; ++k)
            if (c + k < a.columns) word |= (u32)from[(c + k) * a.from.stride[3]] << 8 * k;
        }
        T x[4];
#pragma unroll
        for (i32 k = 0; k < 4; ++k) x[k] = Convert<T>::from(__fmul_rn(stored_number<kE4M3>(word >> 8 * k & 255), scale));
        *(uint2 *)(to + c) = {x[0].bits | (u32)x[1].bits << 16, x[2].bits | (u32)x[3].bits << 16}; // rows have room to a multiple of 8
      }
    }
  }
};

} // namespace strobe::passes
