// The 16-byte messages that the threads of a block exchange through shared memory; and the layout of tiles there.
#pragma once
#include "../ptx/ldmatrix.h"

namespace strobe::sm90 {

template <class Message> __device__ __forceinline__ Message read(u32 address) {
  u32 x[4];
  load_shared(x, address);
  return {(i32)x[0], (i32)x[1], (i32)x[2], (i32)x[3]};
}
__device__ __forceinline__ void write(u32 address, i32 a, i32 b, i32 c, i32 d) {
  u32 x[4] = {(u32)a, (u32)b, (u32)c, (u32)d};
  store_shared(address, x);
}

inline constexpr u32 kRowBytes = 64 * 2; // bytes: tiles are blocks of 64 columns of 16-bit elements

} // namespace strobe::sm90
