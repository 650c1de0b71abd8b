// How the keys of sequences of uneven lengths are shared out among thread blocks. Shares have about equally many keys, and each sequence
// has one or more, so a long one has many. Lengths may lie in the GPU's memory alone, so each block looks at all of them.
#pragma once
#include "../attention/arguments.h"
#include "../tile/registers.h"

namespace strobe {

struct UnevenShare {
  i32 batch; // the sequence; negative: there is no such share
  i32 index, count;
};

// All lanes of a warp find the same share together. There are at most `extra` shares beyond one of each sequence; `round` of them fill the
// GPU once.
template <i32 kSeqused> class UnevenShares {
public:
  __device__ __forceinline__ UnevenShares(const Inputs &in, i32 extra, i32 round) : in_(in) {
    float keys = 0; // of all sequences; to 2^-18 of it, with up to 1,024 of them
    for (i32 b = 0; b < in.batch; b += kAtOnce) {
#pragma unroll
      for (i32 i = 0; i < kOfLane; ++i) keys += (float)length(b + of_lane(i));
    }
#pragma unroll
    for (int m = 16; m; m /= 2) keys += __shfl_xor_sync(0xFFFFFFFFu, keys, m);
    const float enough = fmaxf(kLeastKeys, fminf(kEnoughKeys, keys / (float)round));
    per_key_ = 1 / fmaxf(enough, keys / (float)extra * (1 + 0x1p-16f));
  }

  __device__ __forceinline__ UnevenShare find(i32 share) const {
    UnevenShare found{-1, 0, 0};
    i32 before = 0; // shares of the sequences before b
    for (i32 b = 0; b < in_.batch && before <= share; b += kAtOnce) {
      i32 counts[kOfLane], own = 0;
#pragma unroll
      for (i32 i = 0; i < kOfLane; ++i) own += counts[i] = of(b + of_lane(i));
      i32 end = own;
#pragma unroll
      for (int n = 1; n < 32; n *= 2) {
        const i32 x = __shfl_up_sync(0xFFFFFFFFu, end, n);
        end += tile::lane_id() >= n ? x : 0;
      }
      i32 rest = share - before - (end - own);
#pragma unroll
      for (i32 i = 0; i < kOfLane; ++i) {
        if (rest >= 0 && rest < counts[i]) found = {b + of_lane(i), rest, counts[i]};
        rest -= counts[i];
      }
      before += __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    const u32 lanes = __ballot_sync(0xFFFFFFFFu, found.batch >= 0);
    const int lane = lanes ? 31 - __clz((int)lanes) : 0;
    const auto from_lane = [&](i32 x) { return __shfl_sync(0xFFFFFFFFu, x, lane); };
    return {from_lane(found.batch), from_lane(found.index), from_lane(found.count)};
  }

private:
  static constexpr i32 kOfLane = 4, kAtOnce = 32 * kOfLane; // sequences
  // With fewer keys, a block's start and end take as long as its keys. With more than enough, the last blocks run while much of the GPU is
  // idle. Chosen by the figures of docs/lab/performance.md, "Decoding over uneven lengths"; not measured themselves.
  static constexpr float kLeastKeys = least_keys_of_share(), kEnoughKeys = enough_keys_of_share();
  const Inputs &in_;
  float per_key_; // shares

  static __device__ __forceinline__ i32 of_lane(i32 i) { return kOfLane * tile::lane_id() + i; }
  __device__ __forceinline__ i32 length(i32 b) const { return b < in_.batch ? (i32)in_.sequence<kSeqused>(b).band.seqlen_k : 0; }
  // Rounded, so that sequences of equal lengths have no short shares. All of them have at most batch + extra: each has at most 1 + length *
  // per_key_, and these products add up to less than extra.
  __device__ __forceinline__ i32 of(i32 b) const { return b < in_.batch ? max((i32)((float)length(b) * per_key_ + 0.5f), 1) : 0; }
};

} // namespace strobe
