// Stores a warp's sums to global memory through shared memory that is no longer used, so that rows are written 128 bytes at a time.
#pragma once
#include "../../attention/arguments.h"
#include "../../ptx/ldmatrix.h"
#include "../../ptx/mma.h"
#include "../messages.h"

namespace strobe::sm90 {

// Like store_rows (device/epilogue.h). place: the address of the warp's 16 rows of the first 64 columns, swizzled like tiles. The rows of
// the next 64 columns lie `block` bytes further.
template <class T, int kColumns>
__device__ __forceinline__ void store_rows_staged(const Operand &out, i32 b, i32 h, i64 row, i32 rows, i32 columns,
                                                  const float (&x)[kColumns / 2], float factor, u32 place, u32 block) {
  if (!out) return;
  const int lane = (int)threadIdx.x % 32, own = lane % 16;
  const auto chunk_of = [](int row, int chunk) { return (u32)(row * (int)kRowBytes + ((chunk ^ row % 8) << 4)); };
#pragma unroll
  for (int c = 0; c < kColumns / 16; ++c) {
    const float *y = x + 8 * c;
    const u32 packed[4] = {pack<T>(y[0] * factor, y[1] * factor), pack<T>(y[2] * factor, y[3] * factor),
                           pack<T>(y[4] * factor, y[5] * factor), pack<T>(y[6] * factor, y[7] * factor)};
    stmatrix(place + block * (c / 4) + chunk_of(own, c % 4 * 2 + lane / 16), packed);
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < (kColumns + 63) / 64 * 4; ++n) { // four rows
    const int r = n % 4 * 4 + lane / 8, column = n / 4 * 64 + lane % 8 * 8;
    u32 x[4];
    load_shared(x, place + block * (n / 4) + chunk_of(r, lane % 8));
    if (r < rows && column < columns) store_global(out.at<T>(b, h, row + r, column), x);
  }
  __syncwarp();
}

} // namespace strobe::sm90
