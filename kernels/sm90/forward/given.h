// The mask and the bias of the scores that a lane holds of a tile.
#pragma once
#include "../../device/scores.h"
#include "../arguments.h"
#include "shared.h"

namespace strobe::sm90 {

// The mask's bits, one byte for each 16 keys; device/mask_bits.h describes their layout.
template <Config C> struct GivenMask {
  const u8 *bytes;
  u32 x[C.tile_k / 16];

  // row: the first of the warp's queries.
  template <class Score>
  __device__ __forceinline__ GivenMask(const MaskBits &mask, const Score &scores, i32 h, i32 row)
      : bytes(mask.at(scores.b, h, min(row, scores.seqlen_q - 1) / 16, 0, tile::lane_id())) {}

  // Loads the bits for the keys from `begin` on, a multiple of 16. Bytes past the last key belong to other rows; they are not used.
  __device__ __forceinline__ void fetch(i32 begin) {
#pragma unroll
    for (int n = 0; n < C.tile_k / 16; ++n) x[n] = load_global_byte(bytes + 2 * begin + 32 * n);
  }
  __device__ __forceinline__ void hide(float (&s)[C.tile_k / 2]) const {
#pragma unroll
    for (int i = 0; i < C.tile_k / 2; ++i) {
      if (!(x[i / 8] >> (4 * (i / 2 % 2) + 2 * (i / 4 % 2) + i % 2) & 1)) s[i] = minus_infinity<float>();
    }
  }
};

// A 16-bit bias, read from shared memory in the layout that S has in registers. A value is read where it is needed: the whole bias would
// take as many registers as P. Indices are constants once loops are unrolled, so that only the last values read stay in registers. Element
// i of a lane lies in the lane's row i / 2 % 2, at key 8 (i / 4) + i % 2 plus the lane's offset within the 8 keys. Tiles are swizzled
// (messages.h).
template <Config C> struct GivenBias {
  using E = typename Element<C.features.bias>::type;
  static_assert(C.stages > 1, "a tile's K, with its bias, is given back after V of the same tile was waited for");
  u32 first, next_row; // the address of this lane's first row in stage 0, and the distance to its second row
  u32 stage = 0;       // the offset of the stage that is being read
  u32 x[2][C.tile_k / 16][2];

  // w: the warpgroup; warp: the warp's number within the warpgroup.
  __device__ __forceinline__ GivenBias(const HopperForwardArguments &a, const SharedMemory<C> &shared, int w, int warp) {
    const int lane = tile::lane_id(), row = a.bias_rows_step ? lane % 8 : 0;
    first = shared.bias + kRowBytes * (a.bias_rows_step ? 64 * w + 16 * warp + row : 0) + ((lane / 8 % 2 ^ row) << 4);
    next_row = a.bias_rows_step ? 8 * kRowBytes : 0;
  }
  __device__ __forceinline__ void begin(int n) { stage = n * C.bias_bytes(); }
  // The whole warp must call it for each i, before at(i). If i is the first element of 16 keys in one of a lane's two rows, it loads the
  // bias of these keys.
  __device__ __forceinline__ void read(int i) {
    const int r = i / 2 % 2, n = i / 8;
    if (i % 8 == 2 * r) ldmatrix(x[r][n], (first ^ 32 * (n % 4)) + (stage + r * next_row + n / 4 * C.bias_columns()));
  }
  __device__ __forceinline__ float at(int i) const { return to_float(E{(unsigned short)(x[i / 2 % 2][i / 8][i / 4 % 2] >> 16 * (i % 2))}); }
};

struct GivenNothing {
  template <class... Whatever> __device__ __forceinline__ GivenNothing(const Whatever &...) {}
  __device__ __forceinline__ void fetch(i32) {}
  template <int N> __device__ __forceinline__ void hide(float (&)[N]) const {}
  __device__ __forceinline__ void begin(int) {}
  __device__ __forceinline__ void read(int) {}
};
template <bool kPresent, template <Config> class What, Config C> struct GivenIf {
  using type = GivenNothing;
};
template <template <Config> class What, Config C> struct GivenIf<true, What, C> {
  using type = What<C>;
};

template <Config C, class Score> struct Given {
  static constexpr bool kBias = C.bias_by_tma && C.features.bias;
  typename GivenIf<C.features.mask != 0, GivenMask, C>::type mask;
  typename GivenIf<kBias, GivenBias, C>::type bias;

  // row: the first of the warp's queries.
  __device__ __forceinline__ Given(const HopperForwardArguments &a, const SharedMemory<C> &shared, const Score &scores, i32 h, i32 row,
                                   int w, int warp)
      : mask(a.mask_bits, scores, h, row), bias(a, shared, w, warp) {}

  // The bias of element i of a lane's S.
  struct At {
    const Given &given;
    typename Score::InMemory memory;
    int i;
    __device__ __forceinline__ float bias() const {
      if constexpr (kBias)
        return given.bias.at(i);
      else
        return memory.bias();
    }
    __device__ __forceinline__ bool allowed() const { return true; } // the mask is applied afterwards
  };
};

} // namespace strobe::sm90
