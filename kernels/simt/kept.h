// Which elements of a tile of S dropout keeps, in shared memory. The CTA draws each group of 4x4 elements once
// (kernels/attention/dropout.h).
#pragma once
#include "../device/scores.h"
#include "config.h"

namespace strobe::simt {

template <Config C> class Kept {
  static constexpr int kGroupsAcross = C.tile_k / 4;
  static_assert(C.tile_q % 16 == 0 && C.tile_k % 16 == 0);
  unsigned short *groups_; // bit 4 * row's slot + key's slot of a group: whether the element is kept

public:
  __device__ explicit Kept(void *shared) : groups_(static_cast<unsigned short *>(shared)) {}

  // A barrier must follow before the tile is read, and another one before the next tile is drawn. q0 and k0 are multiples of 16, except in
  // a part whose ranges are not.
  __device__ __forceinline__ void draw(const Dropout<C.features> &dropout, i64 b, i32 h, i32 q0, i32 k0) const {
    if constexpr (C.features.dropout && C.features.part == kAnywhere) // then groups differ from the sequence's: elements are drawn alone
      for (i32 n = (i32)threadIdx.x; n < C.tile_q * C.tile_k / 16; n += C.threads()) {
        const i32 across = n % kGroupsAcross, down = n / kGroupsAcross;
        u32 kept = 0;
#pragma unroll 1
        for (i32 e = 0; e < 16; ++e) kept |= u32(dropout.keep(b, h, q0 + place(down, e / 4), k0 + place(across, e % 4))) << e;
        groups_[n] = (unsigned short)kept;
      }
    else if constexpr (C.features.dropout)
      for (i32 n = (i32)threadIdx.x; n < C.tile_q * C.tile_k / 16; n += C.threads()) {
        const u32 query_group = (u32)(q0 / 4 + n / kGroupsAcross), key_group = (u32)(k0 / 4 + n % kGroupsAcross);
        const Philox bits = dropout_bits(dropout.key, key_group, query_group, dropout.whole_head(h), dropout.whole_batch(b));
        u32 kept = 0;
#pragma unroll
        for (int e = 0; e < 16; ++e) kept |= u32((bits.x[e / 4] >> 8 * (e % 4) & 0xFF) < dropout.threshold) << e;
        groups_[n] = (unsigned short)kept;
      }
  }
  // The row or column of a slot of a group, within the tile. This is the inverse of dropout_group and dropout_slot.
  static __device__ __forceinline__ i32 place(i32 group, i32 slot) { return group / 4 * 16 + group % 4 * 2 + slot % 2 + slot / 2 * 8; }

  // By how much dropout scales the elements that it keeps.
  template <class T> static __device__ __forceinline__ T factor(const Dropout<C.features> &dropout) {
    return C.features.dropout ? T(256) / T(dropout.threshold) : T(1);
  }
  // Whether element (r, c) of the tile is kept.
  __device__ __forceinline__ bool operator()(i32 r, i32 c) const {
    if constexpr (C.features.dropout)
      return groups_[dropout_group(r) * kGroupsAcross + dropout_group(c)] >> (4 * dropout_slot(r) + dropout_slot(c)) & 1;
    else
      return true;
  }
};

} // namespace strobe::simt
