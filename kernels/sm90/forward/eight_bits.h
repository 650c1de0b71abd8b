// Q, K and V in FP8 E4M3, multiplied as they are stored. wgmma takes 8-bit operands whose rows are what is summed over, so V is transposed:
// the copy engine brings it into stages of its own, and three warps make of each the tile that wgmma reads. Q and K come as 16-bit
// operands do.
//
// P is in registers, as S left it: a lane has the keys 16m + 2t, +1, +8, +9 of its rows, where wgmma expects 16m + 4t to 16m + 4t + 3. The
// order of keys does not matter to a sum, so V's tile has this order of keys. And its columns have an order in which eight rows that are
// stored together lie side by side: of 16 columns first the even ones. A lane's sums are then four neighbouring columns.
//
// A sum of wgmma keeps some 14 bits if operands have eight. So P V of each tile is a sum of its own, added to O in FP32.
#pragma once
#include "../../ptx/ldmatrix.h"
#include "source.h"
#include "stored.h"

namespace strobe::sm90 {

// P is multiplied by 2^kRaised before it is rounded to E4M3, whose numbers reach from 2^-9 to 448. The sum l has the same factor.
inline constexpr float kRaised = 8, kLowered = 1.0f / 256;

// An exponent that is raised by kRaised.
template <class Exponent> struct Raised {
  const Exponent &of;
  __device__ __forceinline__ float at(float s, int i, float c) const { return of.at(s, i, c); }
  __device__ __forceinline__ float constant(float c) const { return of.constant(c + kRaised / of.difference(1.0f)); }
};

// Two numbers, rounded to E4M3: x in the low byte.
__device__ __forceinline__ u32 pack_e4m3(float x, float y) {
  unsigned short z;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(z) : "f"(y), "f"(x));
  return z;
}

// The column of O, beside 16 m, that element n of the wgmma's columns has: 0 to 15.
STROBE_FN constexpr int column_of(int n) { return n < 8 ? 2 * n : 2 * n - 15; }

// The warps that transpose V. Each takes 32 keys of 16 columns at a time.
template <Config C> struct Transpose {
  enum : int {
    kKeys = C.tile_k / 32,
    kColumns = C.head_dim_v / 16,
    kPieces = kKeys * kColumns,
    kTogether = 4 // pieces whose loads are in flight
  };
  const SharedMemory<C> &shared;

  __device__ __forceinline__ void all() const {
    Stage<C> to{};
    StoredStage<C> from{};
#pragma unroll 1
    for (;; from.advance(), to.advance()) {
      mbarrier_wait(shared.stored_full(from.index), from.parity);
      if (read<Tile>(shared.stored_message(from.index)).last == kStoredEnd) break;
      mbarrier_wait(shared.v_empty(to.index), to.parity ^ 1);
      transpose(shared.stored_tile(from.index), shared.v + to.index * C.v_bytes());
      async_proxy_fence();
      __syncwarp();
      if (tile::lane_id() == 0) {
        mbarrier_arrive(shared.v_full(to.index));
        mbarrier_arrive(shared.stored_empty(from.index));
      }
    }
  }

private:
  __device__ __forceinline__ void transpose(u32 from, u32 to) const {
    const int lane = tile::lane_id(), warp = (int)threadIdx.x / 32 - 1;
#pragma unroll 1
    for (int first = warp * kTogether; first < kPieces; first += C.kDequantising * kTogether) {
      u32 x[kTogether][4];
#pragma unroll
      for (int n = 0; n < kTogether; ++n)
        if (first + n < kPieces) ldmatrix_transposed(x[n], place_of_keys(from, first + n, lane));
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (first + n >= kPieces) continue;
        // A word has two columns of the keys 8m + 2t and 8m + 2t + 1.
        const u32 y[4] = {__byte_perm(x[n][0], x[n][1], 0x6420), __byte_perm(x[n][2], x[n][3], 0x6420),
                          __byte_perm(x[n][0], x[n][1], 0x7531), __byte_perm(x[n][2], x[n][3], 0x7531)};
        stmatrix(place_of_columns(to, first + n, lane), y);
      }
    }
  }
  // The address of the lane's row of the four matrices of eight keys, as they are stored.
  static __device__ __forceinline__ u32 place_of_keys(u32 tile, int piece, int lane) {
    const int key = piece / kColumns * 32 + lane, chunk = piece % kColumns;
    return tile + C.tile_k * kRowBytes * (chunk / 8) + key * kRowBytes + ((chunk ^ key) % 8 << 4);
  }
  // The same of the matrices of eight columns: the even ones of keys 0 to 15 and 16 to 31, then the odd ones.
  static __device__ __forceinline__ u32 place_of_columns(u32 tile, int piece, int lane) {
    const int row = piece % kColumns * 16 + lane / 16 * 8 + lane % 8, chunk = piece / kColumns * 2 + lane / 8 % 2;
    return tile + C.head_dim_v * kRowBytes * (chunk / 8) + row * kRowBytes + ((chunk ^ row) % 8 << 4);
  }
};

// The factors of S: the scales of Q and K. A factor that all of an item's scores share is part of the exponent's unit, unless it is so
// small or large, or negative, that the exponent cannot have it.
template <Config C> struct ScoreScales {
  static constexpr bool kKeys = (C.scaled_rows & kScaledKeys) != 0;
  static constexpr bool kRows = C.packed || (C.scaled_rows & kScaledQueries) != 0; // packed heads may have scales of their own
  float factor[kRows ? 2 : 1];                                                     // of a lane's rows
  bool multiplies;                                                                 // whether S has to be multiplied

  // place(r): the query and head of a lane's row r.
  template <class Place>
  __device__ __forceinline__ ScoreScales(const HopperForwardArguments &a, const Item &item, const Sequence &sequence, const Place &place) {
    const KeyScales &s = scales_of<C>(a);
    const i64 kv = a.group_divisor.divide(item.h);
    const float k = kKeys ? 1.0f : scale_at(s.k.data, item.b * s.k.stride[0] * !C.features.pages + kv * s.k.stride[1], s.half_k != 0);
#pragma unroll
    for (int r = 0; r < (kRows ? 2 : 1); ++r) {
      const auto [i, h] = place(r);
      const i64 query = kRows ? (i < sequence.band.seqlen_q ? sequence.q0 + i : -1) : 0;
      factor[r] = query < 0 ? k : k * scale_at(s.q.data, item.b * s.q.stride[0] + h * s.q.stride[1] + query * s.q.stride[2], s.half_q != 0);
    }
    const float all = factor[0] * (float)a.in.scale;
    multiplies = kRows || !(all > 1e-30f && all <= 1e4f);
  }
  // Scores whose unit has the factor.
  template <class Score> __device__ __forceinline__ Score applied(Score scores) const {
    if (multiplies) return scores;
    scores.scale *= factor[0];
    if constexpr (natural_factor<C.features>(2) != 1) scores.unit *= factor[0];
    return scores;
  }
  // scales: the scales of the tile's keys.
  template <int N> __device__ __forceinline__ void multiply(float (&S)[N], u32 scales) const {
    if constexpr (kKeys) {
#pragma unroll
      for (int j = 0; j < N / 4; ++j) {
        float by[2];
        load_shared(by, scales + 4 * (8 * j + tile::lane_column(0, 0)));
#pragma unroll
        for (int i = 0; i < 4; ++i) S[4 * j + i] *= by[i % 2];
      }
    }
    if (!multiplies) return;
#pragma unroll
    for (int i = 0; i < N; ++i) S[i] *= factor[kRows ? i / 2 % 2 : 0];
  }
};

// The scale of an item's values, which are as many as it has keys.
template <Config C> __device__ __forceinline__ float scale_of_values(const HopperForwardArguments &a, const Item &item) {
  const KeyScales &s = scales_of<C>(a);
  return scale_at(s.v.data, item.b * s.v.stride[0] * !C.features.pages + (i64)a.group_divisor.divide(item.h) * s.v.stride[1],
                  s.half_v != 0);
}

// Which bytes of a are below those of b: 255, or 0.
__device__ __forceinline__ u32 less_bytes(u32 a, u32 b) {
  const u32 difference = (a | 0x80808080u) - (b & 0x7F7F7F7Fu);
  const u32 not_less = ((a & ~b) | (~(a ^ b) & difference)) & 0x80808080u;
  return ~((not_less >> 7) * 255u);
}
// Which bytes are E4M3's NaN: 255, or 0.
__device__ __forceinline__ u32 nan_bytes(u32 x) { return (((x & 0x7F7F7F7Fu) + 0x01010101u) >> 7 & 0x01010101u) * 255u; }

} // namespace strobe::sm90
