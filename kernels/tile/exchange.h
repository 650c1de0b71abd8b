// Tiles that warps pass to one another through shared memory: 16x16 blocks of 512 bytes, one after another.
#pragma once
#include "../ptx/ldmatrix.h"
#include "../ptx/math.h"
#include "registers.h"

namespace strobe::tile {

inline constexpr int kBlockBytes = 512;

// Stores a block in the order of lanes, so that the same lane of another warp loads its part at once.
__device__ __forceinline__ void put(u32 base, int block, const Left &f) { store_shared(base + block * kBlockBytes + lane_id() * 16, f.x); }
__device__ __forceinline__ Left take(u32 base, int block) {
  Left f;
  load_shared(f.x, base + block * kBlockBytes + lane_id() * 16);
  return f;
}

// Stores a block as four 8x8 quarters with rows of 16 bytes, so that it can also be loaded transposed.
__device__ __forceinline__ void put_parts(u32 base, int block, const Left &f) {
#pragma unroll
  for (int i = 0; i < 4; ++i) store_shared(base + block * kBlockBytes + i * 128 + lane_id() * 4, f.x[i]);
}
__device__ __forceinline__ Left take_parts(u32 base, int block) {
  Left f;
  ldmatrix(f.x, base + block * kBlockBytes + lane_id() * 16);
  return f;
}
__device__ __forceinline__ Left take_parts_transposed(u32 base, int block) {
  int lane = lane_id(), part = lane >> 4 | (lane >> 3 & 1) << 1;
  Left f;
  ldmatrix_transposed(f.x, base + block * kBlockBytes + part * 128 + (lane & 7) * 16);
  return f;
}

// Element e of a packed pair.
template <class T> __device__ __forceinline__ float unpacked(u32 pair, int e);
template <> __device__ __forceinline__ float unpacked<bf16>(u32 pair, int e) {
  return __uint_as_float(e ? pair & 0xFFFF0000u : pair << 16);
}
template <> __device__ __forceinline__ float unpacked<f16>(u32 pair, int e) { return to_float(f16{(unsigned short)(pair >> 16 * e)}); }

// Sets those elements to 0 whose sign bit is set.
__device__ __forceinline__ Left positive(Left f) {
#pragma unroll
  for (int i = 0; i < 4; ++i) f.x[i] &= ~negative_pairs(f.x[i]);
  return f;
}

// The products of packed pairs.
template <class T> __device__ __forceinline__ u32 multiply_pairs(u32 x, u32 y);
template <> __device__ __forceinline__ u32 multiply_pairs<bf16>(u32 x, u32 y) {
  return multiply_add_pairs<bf16>(x, y, 0x80008000u); // adding -0 keeps the sign of a product that is 0
}

} // namespace strobe::tile
