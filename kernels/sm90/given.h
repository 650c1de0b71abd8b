// What mask and bias say of the scores that a lane holds of a tile: fetched 16 bytes at a time while the tensor cores compute the scores, then
// handed to the lanes of the quad that hold the columns.
#pragma once
#include "../attention/scores.h"
#include "config.h"

namespace strobe::sm90 {

__device__ __forceinline__ void load_global(u32 (&x)[4], const void *address, bool inside) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
               "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
               : "l"(address), "r"((int)inside)
               : "memory");
}

// Bits of a bool mask: bit e of word n / 32, from bit n on, is key 8 (n / 8) + 2 (lane % 4) + e of the tile.
template <Config C> struct GivenMask {
  static constexpr int kN = C.tile_k;
  static_assert(kN % 64 == 0);
  const u8 *row[2];
  u32 x[2][kN / 64][4];
  u32 bits[2][kN / 32];

  template <class Score, class Row> __device__ __forceinline__ GivenMask(const Score &scores, const Row (&rows)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) row[r] = scores.in.mask.template at<const u8>(scores.b, rows[r].h, rows[r].i, 0);
  }
  __device__ __forceinline__ void fetch(i32 begin, i32 seqlen_k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int m = 0; m < kN / 64; ++m) {
        const i32 j = begin + 64 * m + 16 * (tile::lane_id() % 4);
        load_global(x[r][m], row[r] + j, j < seqlen_k);
      }
    }
  }
  __device__ __forceinline__ void share() {
    const int t = tile::lane_id() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int m = 0; m < kN / 64; ++m) {
        u32 own = 0; // of 16 keys
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 ones = (x[r][m][i] & 0x01010101u) * 0x01020408u; // a bool is 0 or 1
          own |= ones >> 24 << 4 * i;
        }
        own <<= 16 * (t % 2);
        own |= __shfl_xor_sync(0xFFFFFFFFu, own, 1);
        const u32 other = __shfl_xor_sync(0xFFFFFFFFu, own, 2);
        bits[r][2 * m] = (t < 2 ? own : other) >> 2 * t;
        bits[r][2 * m + 1] = (t < 2 ? other : own) >> 2 * t;
      }
    }
  }
  __device__ __forceinline__ bool allows(int r, int j) const { return bits[r][j / 32] >> j % 32 & 1; } // j: without the lane's share
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
  template <class Score, class Row> __device__ __forceinline__ GivenNothing(const Score &, const Row (&)[2]) {}
  __device__ __forceinline__ void fetch(i32, i32) {}
  __device__ __forceinline__ void share() {}
};
template <bool kIs, template <Config> class Is, Config C> struct GivenIf {
  using type = GivenNothing;
};
template <template <Config> class Is, Config C> struct GivenIf<true, Is, C> {
  using type = Is<C>;
};

template <Config C, class Score> struct Given {
  static constexpr bool kMask = C.wide && C.features.mask, kBias = C.wide && C.features.bias;
  typename GivenIf<kMask, GivenMask, C>::type mask;
  typename GivenIf<kBias, GivenBias, C>::type bias;

  template <class Row>
  __device__ __forceinline__ Given(const Score &scores, const Row (&rows)[2]) : mask(scores, rows), bias(scores, rows) {}
  __device__ __forceinline__ void fetch(i32 begin, i32 seqlen_k) { mask.fetch(begin, seqlen_k), bias.fetch(begin, seqlen_k); }
  __device__ __forceinline__ void share() { mask.share(), bias.share(); }

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
    __device__ __forceinline__ bool allowed() const {
      if constexpr (kMask)
        return given.mask.allows(r, j);
      else
        return memory.allowed();
    }
  };
};

} // namespace strobe::sm90
