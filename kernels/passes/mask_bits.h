// Packs a bool mask into bits. A warp takes 16 queries and 64 keys, and each lane 32 keys of one query; then lanes exchange bits, so that
// they lie in the order of the forward's lanes. Transposed: 16 keys and 64 queries, each lane 32 queries of one key.
#pragma once
#include "../device/mask_bits.h"
#include "../ptx/math.h"

namespace strobe::passes {

template <MaskConfig C> struct PackMask {
  using Arguments = MaskArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const u32 cell = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    if (cell >= a.cells) return;
    const u32 line = a.columns.divide(cell), head = a.rows.divide(line), b = a.heads.divide(head), h = head - b * a.heads.by;
    const i32 lane = (i32)threadIdx.x % 32, column = (i32)(cell - line * a.columns.by), row = (i32)(line - head * a.rows.by);
    const BasicRange<i32> visible = a.band.keys_any(16 * row, 16 * row + 16);
    if (64 * column >= visible.end || 64 * column + 64 <= visible.begin) return;
    u32 seen; // 32 columns of row lane / 2
    if constexpr (C.by_keys)
      seen = load_transposed(a, b, h, 64 * column, 16 * row);
    else
      seen = load(a, b, h, 16 * row + lane / 2, 64 * column + 32 * (lane % 2));
    u32 x[2][2]; // x[r][c]: row lane / 4 + 8 r, columns from 32 c on, shifted to this lane's first column
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) x[r][c] = __shfl_sync(0xFFFFFFFFu, seen, 2 * (lane / 4 + 8 * r) + c) >> 2 * (lane % 4);
    }
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      u32 bits = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 y = x[r][block / 2] >> 16 * (block % 2);
        bits |= ((y & 3) | (y >> 8 & 3) << 2) << 4 * r;
      }
      *a.bits.at(b, h, row, 4 * column + block, lane) = (u8)bits;
    }
  }

private:
  // The bits of query i and the 32 keys from j on.
  static __device__ __forceinline__ u32 load(const Arguments &a, i64 b, i64 h, i32 i, i32 j) {
    const u8 *mask = a.mask.template at<const u8>(b, h, min(i, a.queries - 1), j); // bits of queries that do not exist are not used
    u32 seen = 0;
    if constexpr (C.aligned) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (j + 16 * k >= a.keys) continue;
        const uint4 x = reinterpret_cast<const uint4 *>(mask)[k];
        seen |= (nonzero(x.x) | nonzero(x.y) << 4 | nonzero(x.z) << 8 | nonzero(x.w) << 12) << 16 * k;
      }
    } else {
#pragma unroll 4
      for (int k = 0; k < 32; ++k) {
        if (j + k < a.keys && mask[k * a.mask.stride[3]] != 0) seen |= 1u << k;
      }
    }
    return seen;
  }
  // The bits of key j + lane / 2 and the 32 queries from i + 32 (lane % 2) on.
  static __device__ __forceinline__ u32 load_transposed(const Arguments &a, i64 b, i64 h, i32 i, i32 j) {
    const i32 lane = (i32)threadIdx.x % 32;
    u32 own[2], seen = 0; // own: of queries i + lane and i + 32 + lane, a bit for each of 16 keys
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u8 *mask = a.mask.template at<const u8>(b, h, min(i + 32 * half + lane, a.queries - 1), j);
      own[half] = 0;
      if constexpr (C.aligned) {
        const uint4 x = *reinterpret_cast<const uint4 *>(mask);
        own[half] = nonzero(x.x) | nonzero(x.y) << 4 | nonzero(x.z) << 8 | nonzero(x.w) << 12;
      } else {
#pragma unroll 4
        for (int k = 0; k < 16; ++k) {
          if (j + k < a.keys && mask[k * a.mask.stride[3]] != 0) own[half] |= 1u << k;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const u32 first = __ballot_sync(0xFFFFFFFFu, own[0] >> k & 1), second = __ballot_sync(0xFFFFFFFFu, own[1] >> k & 1);
      if (lane / 2 == k) seen = lane % 2 ? second : first;
    }
    return seen;
  }
  // A bit for each of the word's four bytes: whether it is not 0.
  static __device__ __forceinline__ u32 nonzero(u32 x) {
    const u32 ones = ((x & 0x7F7F7F7Fu) + 0x7F7F7F7Fu | x) >> 7 & 0x01010101u;
    return ones * 0x01020408u >> 24;
  }
};

} // namespace strobe::passes
