// Dropout of two 16x16 blocks of P side by side. A lane has 16 elements in these blocks and makes one Philox call; two lanes exchange
// halves.
#pragma once
#include "../tile/registers.h"
#include "scores.h"

namespace strobe {

template <Features F> struct QueryMajorDropout {
  Dropout<F> dropout;
  u32 head, batch; // in a part, numbers in the whole problem

  // Draws one random byte for each of this lane's elements: rows g and g + 8 of the left block, then those of the right block. i, j: the
  // first query and key, multiples of 16.
  __device__ __forceinline__ void draw(u32 (&bytes)[4], i32 i, i32 j) const {
    int lane = tile::lane_id(), odd = lane >> 2 & 1;
    // Lanes with an even g call Philox for the left block, and the partner, lane 4(g^1)+t, calls it for the right block. Each call covers
    // the rows of both lanes.
    u32 query_group = (u32)i / 4 + (lane >> 3), key_group = (u32)j / 4 + 4 * odd + (lane & 3);
    Philox own = dropout_bits(dropout.key, key_group, query_group, head, batch);
    u32 low = __shfl_xor_sync(0xFFFFFFFFu, odd ? own.x[0] : own.x[1], 4), high = __shfl_xor_sync(0xFFFFFFFFu, odd ? own.x[2] : own.x[3], 4);
    u32 first = odd ? own.x[1] : own.x[0], second = odd ? own.x[3] : own.x[2];
    bytes[0] = odd ? low : first, bytes[1] = odd ? high : second;
    bytes[2] = odd ? first : low, bytes[3] = odd ? second : high;
  }
  // Sets the dropped elements of P to 0.
  __device__ __forceinline__ void apply(tile::Accumulator &left, tile::Accumulator &right, i32 i, i32 j) const {
    if constexpr (F.part == kAnywhere) { // then i and j are not multiples of 16
      keep_each(left, i, j);
      keep_each(right, i, j + 16);
      return;
    }
    u32 bytes[4];
    draw(bytes, i, j);
    keep(left, bytes[0], bytes[1]);
    keep(right, bytes[2], bytes[3]);
  }
  // Sets the dropped elements of a packed pair to 0. The pair has columns 8 c and 8 c + 1 (plus the lane's offset) of the row to which the
  // bytes belong.
  __device__ __forceinline__ u32 kept(u32 pair, u32 bytes, int c) const {
    return pair & less_pairs(__byte_perm(bytes, 0, c ? 0x4342 : 0x4140), dropout.threshold * 0x00010001u);
  }

private:
  __device__ __forceinline__ void keep_each(tile::Accumulator &P, i32 i, i32 j) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int c = k / 4, r = k / 2 % 2, e = k % 2;
      if (!dropout_keep(dropout.key, dropout.threshold, batch, head, i + tile::lane_row(r), j + tile::lane_column(c, e)))
        P.x[c][2 * r + e] = 0;
    }
  }
  // low, high: the bytes of rows g and g + 8.
  __device__ __forceinline__ void keep(tile::Accumulator &P, u32 low, u32 high) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      int c = k / 4, r = k / 2 % 2, e = k % 2;
      u32 byte = (r ? high : low) >> 8 * (2 * c + e) & 0xFF;
      if (byte >= dropout.threshold) P.x[c][2 * r + e] = 0;
    }
  }
};

} // namespace strobe
