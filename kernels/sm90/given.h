// What mask and bias say of the scores that a lane holds of a tile: fetched 16 bytes at a time while the tensor cores compute the scores, then
// handed to the lanes of the quad that hold the columns.
#pragma once
#include "../attention/scores.h"
#include "arguments.h"
#include "config.h"

namespace strobe::sm90 {

__device__ __forceinline__ void load_global(u32 (&x)[4], const void *address, bool inside) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
               "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
               : "l"(address), "r"((int)inside)
               : "memory");
}

// What a mask says, a byte for each 16 keys: mask_config.h has its bits.
template <Config C> struct GivenMask {
  const u8 *bytes;
  u32 x[C.tile_k / 16];

  // The warp's queries begin at row.
  template <class Score>
  __device__ __forceinline__ GivenMask(const MaskBits &mask, const Score &scores, i32 h, i32 row)
      : bytes(mask.at(scores.b, h, min(row, scores.seqlen_q - 1) / 16, 0, tile::lane_id())) {}

  // begin: a multiple of 16. Beyond the last key the bytes are somebody else's.
  __device__ __forceinline__ void fetch(i32 begin) {
#pragma unroll
    for (int n = 0; n < C.tile_k / 16; ++n)
      asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(x[n]) : "l"(bytes + 2 * begin + 32 * n) : "memory");
  }
  __device__ __forceinline__ void hide(float (&s)[C.tile_k / 2]) const {
#pragma unroll
    for (int i = 0; i < C.tile_k / 2; ++i) {
      if (!(x[i / 8] >> (4 * (i / 2 % 2) + 2 * (i / 4 % 2) + i % 2) & 1)) s[i] = minus_infinity<float>();
    }
  }
};

// Pairs of a 16-bit bias.
template <Config C> struct GivenBias {
  using E = typename Element<C.features.bias>::type;
  static constexpr int kN = C.tile_k;
  static_assert(kN % 32 == 0);
  const E *row[2];
  u32 x[2][kN / 32][4]; // after share(): x[r][m][n] is the pair of columns 32 m + 8 n + 2 (lane % 4)

  template <class Score, class Row> __device__ __forceinline__ GivenBias(const Score &scores, const Row (&rows)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) row[r] = scores.in.bias.template at<const E>(scores.b, rows[r].h, rows[r].i, 0);
  }
  __device__ __forceinline__ void fetch(i32 begin, i32 seqlen_k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int m = 0; m < kN / 32; ++m) {
        const i32 j = begin + 32 * m + 8 * (tile::lane_id() % 4);
        load_global(x[r][m], row[r] + j, j < seqlen_k);
      }
    }
  }
  // Four lanes transpose 4x4 pairs.
  __device__ __forceinline__ void share() {
    const bool odd = tile::lane_id() & 1, high = tile::lane_id() & 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int m = 0; m < kN / 32; ++m) {
        u32(&y)[4] = x[r][m];
        exchange(y[0], y[1], odd, 1);
        exchange(y[2], y[3], odd, 1);
        exchange(y[0], y[2], high, 2);
        exchange(y[1], y[3], high, 2);
      }
    }
  }
  __device__ __forceinline__ float bias(int r, int j) const {
    return to_float(E{(unsigned short)(x[r][j / 32][j % 32 / 8] >> 16 * (j % 2))});
  }

private:
  // The lower lane keeps a and gives b for the other's a; the upper one keeps b.
  static __device__ __forceinline__ void exchange(u32 &a, u32 &b, bool upper, int distance) {
    const u32 got = __shfl_xor_sync(0xFFFFFFFFu, upper ? a : b, distance);
    (upper ? a : b) = got;
  }
};

struct GivenNothing {
  template <class... Whatever> __device__ __forceinline__ GivenNothing(const Whatever &...) {}
  __device__ __forceinline__ void fetch(i32) {}
  __device__ __forceinline__ void fetch(i32, i32) {}
  template <int N> __device__ __forceinline__ void hide(float (&)[N]) const {}
  __device__ __forceinline__ void share() {}
};
template <bool kIs, template <Config> class Is, Config C> struct GivenIf {
  using type = GivenNothing;
};
template <template <Config> class Is, Config C> struct GivenIf<true, Is, C> {
  using type = Is<C>;
};

template <Config C, class Score> struct Given {
  static constexpr bool kBias = C.wide && C.features.bias;
  typename GivenIf<C.features.mask != 0, GivenMask, C>::type mask;
  typename GivenIf<kBias, GivenBias, C>::type bias;

  template <class Row>
  __device__ __forceinline__ Given(const HopperForwardArguments &a, const Score &scores, const Row (&rows)[2], i32 row)
      : mask(a.mask, scores, rows[0].h, row), bias(scores, rows) {}
  __device__ __forceinline__ void fetch(i32 begin, i32 seqlen_k) { bias.fetch(begin, seqlen_k); }
  __device__ __forceinline__ void share() { bias.share(); }

  // Of row r and the column that is j without the lane's share.
  struct At {
    const Given &given;
    typename Score::InMemory memory;
    int r, j;
    __device__ __forceinline__ float bias() const {
      if constexpr (kBias)
        return given.bias.bias(r, j);
      else
        return memory.bias();
    }
    __device__ __forceinline__ bool allowed() const { return true; } // what the mask hides is hidden afterwards
  };
};

} // namespace strobe::sm90
