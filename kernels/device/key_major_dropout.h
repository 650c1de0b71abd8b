// Dropout of 16x16 blocks of P transposed, whose rows are keys. One Philox call gives 16 bytes; two lanes with neighbouring keys use 8
// bytes each.
#pragma once
#include "../tile/registers.h"
#include "scores.h"

namespace strobe {

template <Features F> struct KeyMajorDropout {
  Dropout<F> dropout;

  // Negates the dropped elements of P^T. i, j: the first query and key of block [0][0], multiples of 16.
  template <int kKeys, int kQueries>
  __device__ __forceinline__ void mark(tile::Accumulator (&P)[kKeys][kQueries], i32 i, i32 j, i32 head, i32 batch) const {
    const u32 of_head = dropout.whole_head(head), of_batch = dropout.whole_batch(batch);
    if constexpr (F.part == kAnywhere) { // then i and j are not multiples of 16
#pragma unroll
      for (int n = 0; n < kKeys * kQueries * 8; ++n) {
        const int m = n / 8 % kKeys, q = n / 8 / kKeys, c = n / 4 % 2, r = n / 2 % 2, e = n % 2;
        float &x = P[m][q].x[c][2 * r + e];
        if (!dropout_keep(dropout.key, dropout.threshold, of_batch, of_head, i + 16 * q + tile::lane_column(c, e),
                          j + 16 * m + tile::lane_row(r)))
          x = -x;
      }
      return;
    }
    // Lanes work on two blocks at a time. Lanes with an even key call Philox for the first block, their neighbours for the second one, and
    // they exchange halves. For a last block without a partner, both lanes make the same call.
    constexpr int kBlocks = kKeys * kQueries;
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      bool pair = n + 1 < kBlocks;
      int lane = tile::lane_id(), odd = lane >> 2 & 1, own = pair ? n + odd : n;
      u32 key_group = (u32)((j >> 4) + own % kKeys) * 4 + (lane >> 3), query_group = (u32)((i >> 4) + own / kKeys) * 4 + (lane & 3);
      Philox bits = dropout_bits(dropout.key, key_group, query_group, of_head, of_batch);
      u32 mine = odd ? 0x7531 : 0x6420, theirs = odd ? 0x6420 : 0x7531; // which bytes of two words belong to the keys g and g + 8
      u32 low = __byte_perm(bits.x[0], bits.x[1], mine), high = __byte_perm(bits.x[2], bits.x[3], mine);
      if (pair) {
        u32 other_low = __shfl_xor_sync(0xFFFFFFFFu, __byte_perm(bits.x[0], bits.x[1], theirs), 4);
        u32 other_high = __shfl_xor_sync(0xFFFFFFFFu, __byte_perm(bits.x[2], bits.x[3], theirs), 4);
        mark(P[n % kKeys][n / kKeys], odd ? other_low : low, odd ? other_high : high);
        mark(P[(n + 1) % kKeys][(n + 1) / kKeys], odd ? low : other_low, odd ? high : other_high);
      } else {
        mark(P[n % kKeys][n / kKeys], low, high);
      }
    }
  }

private:
  // low: the bytes of query 2t with keys g and g + 8, and of query 2t + 1 with the same keys. high: the same for the queries 8 further.
  __device__ __forceinline__ void mark(tile::Accumulator &P, u32 low, u32 high) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          u32 byte = (c ? high : low) >> 8 * (2 * e + r) & 0xFF;
          float &x = P.x[c][2 * r + e];
          if (byte >= dropout.threshold) x = -x;
        }
      }
    }
  }
};

} // namespace strobe
