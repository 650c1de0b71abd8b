// Infinities and NaN in V. What a query does not see must not reach it, but 0 * infinity in P V would: in tiles
// where something is hidden, these numbers are set aside: V holds 0 in their place, and they are added for those who see them.
#pragma once
#include "../tile/copy.h"

namespace strobe::mma {

using tile::Accumulator;

// Of the columns of a warp's S that this lane holds, in a row of its: which it sees. Bit 4n + 2c + e.
template <int kM, int kN> struct Seen {
  static_assert(4 * kN <= 32);
  u32 bits[kM][2];
  __device__ __forceinline__ explicit Seen(const Accumulator (&S)[kM][kN]) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      int m = i / 2, r = i % 2;
      bits[m][r] = 0;
#pragma unroll
      for (int k = 0; k < 4 * kN; ++k) bits[m][r] |= (u32)(S[m][k / 4].x[k / 2 % 2][2 * r + k % 2] != minus_infinity<float>()) << k;
    }
  }
};

// kRows x kColumns of V, and two bits for each of its elements: 0: finite, 1: infinity, 2: -infinity, 3: NaN.
template <i32 kDType, int kRows, int kColumns, int kThreads> struct Specials {
  using T = typename Element<kDType>::type;
  using L = tile::Layout<kColumns>;
  static constexpr u32 kBytes = kRows * L::kChunks * 2;
  u32 v, codes; // shared memory

  // Each thread looks through its share, finds whether there are any, and sets them aside.
  __device__ __forceinline__ bool found(int thread) const {
    constexpr u32 kExponent = (kDType == kF16 ? 0x7C007C00 : 0x7F807F80), kLowest = (kDType == kF16 ? 0x04000400 : 0x00800080);
    u32 any = 0; // the exponent of all ones carries into the sign
#pragma unroll
    for (int i = 0; i < kRows * L::kChunks; i += kThreads) {
      u32 x[4];
      if (i + thread < kRows * L::kChunks) {
        load_shared(x, v + 16 * (i + thread));
#pragma unroll
        for (int w = 0; w < 4; ++w) any |= (x[w] & kExponent) + kLowest;
      }
    }
    return any & 0x80008000u;
  }
  __device__ __forceinline__ void set_aside(int thread) const {
#pragma unroll 1
    for (int i = thread; i < kRows * L::kChunks; i += kThreads) {
      u32 x[4], code = 0, place = v + L::offset(i / L::kChunks, i % L::kChunks);
      load_shared(x, place);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float value = to_float(T{(unsigned short)(x[e / 2] >> 16 * (e % 2))});
        u32 kind = value != value ? 3 : value == -minus_infinity<float>() ? 1 : value == minus_infinity<float>() ? 2 : 0;
        if (kind) x[e / 2] &= e % 2 ? 0xFFFFu : 0xFFFF0000u;
        code |= kind << 2 * e;
      }
      if (code) store_shared(place, x);
      store_shared_16(codes + 2 * i, code);
    }
  }

  template <int kM, int kN> __device__ __forceinline__ void add(Accumulator (&O)[kM][kColumns / 16], const Seen<kM, kN> &seen) const {
    int lane = tile::lane_id();
#pragma unroll 1
    for (int j = 0; j < kRows; ++j) {
      u32 bit = (u32)(j / 16 * 4 + j / 8 % 2 * 2 + j % 2);
      bool sees[kM][2];
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
        sees[i / 2][i % 2] = __shfl_sync(0xFFFFFFFFu, seen.bits[i / 2][i % 2], (lane & 28) + j % 8 / 2) >> bit & 1;
#pragma unroll
      for (int k = 0; k < L::kChunks; ++k) {
        u32 code = load_shared_16(codes + 2 * (j * L::kChunks + k)) >> 4 * (lane & 3);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          u32 kind = code >> 2 * e & 3;
          float value = kind == 3   ? __int_as_float(0x7fffffff)
                        : kind == 2 ? minus_infinity<float>()
                        : kind      ? -minus_infinity<float>()
                                    : 0.0f;
#pragma unroll
          for (int i = 0; i < 2 * kM; ++i) {
            if (sees[i / 2][i % 2]) O[i / 2][k / 2].x[k % 2][2 * (i % 2) + e] += value;
          }
        }
      }
    }
  }
};

} // namespace strobe::mma
