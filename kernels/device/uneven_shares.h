// Divides the keys of sequences of uneven lengths into shares for the thread blocks. Shares have about equally many keys, and each sequence
// has at least one share, so a long sequence has many. Lengths may lie in the GPU's memory only, so each block reads all of them.
#pragma once
#include "../attention/arguments.h"
#include "../tile/registers.h"

namespace strobe {

struct UnevenShare {
  i32 batch;        // the sequence; negative: the share does not exist
  i32 index, count; // the share's number within its sequence; the number of the sequence's shares
};

// All lanes of a warp find the same share together. extra: the largest number of shares beyond one per sequence. round: how many shares
// fill the GPU once.
class UnevenShares {
public:
  __device__ __forceinline__ UnevenShares(const Inputs &in, i32 extra, i32 round) : in_(in) {
    float keys = 0; // the keys of all sequences, with a relative error of 2^-18 for up to 1,024 sequences
#pragma unroll
    for (i32 i = 0; i < kOfLane; ++i) keys += (float)(first_[i] = length(of_lane(i)));
    for (i32 b = kAtOnce; b < in.batch; b += kAtOnce) {
#pragma unroll
      for (i32 i = 0; i < kOfLane; ++i) keys += (float)length(b + of_lane(i));
    }
#pragma unroll
    for (int m = 16; m; m /= 2) keys += __shfl_xor_sync(0xFFFFFFFFu, keys, m);
    const float enough = fmaxf(kLeastKeys, fminf(kEnoughKeys, __fdividef(keys, (float)round)));
    per_key_ = __fdividef(1.0f, fmaxf(enough, __fdividef(keys, (float)extra) * (1 + 0x1p-16f)));
  }

  __device__ __forceinline__ UnevenShare find(i32 share) const {
    UnevenShare found{-1, 0, 0};
    i32 lengths[kOfLane];
#pragma unroll
    for (i32 i = 0; i < kOfLane; ++i) lengths[i] = first_[i];
    i32 b = 0, before = 0; // before: shares of the preceding sequences
    while (true) {
      i32 counts[kOfLane], own = 0;
#pragma unroll
      for (i32 i = 0; i < kOfLane; ++i) own += counts[i] = of(b + of_lane(i), lengths[i]);
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
      b += kAtOnce;
      if (b >= in_.batch || before > share) break;
#pragma unroll
      for (i32 i = 0; i < kOfLane; ++i) lengths[i] = length(b + of_lane(i));
    }
    const u32 lanes = __ballot_sync(0xFFFFFFFFu, found.batch >= 0);
    const int lane = lanes ? 31 - __clz((int)lanes) : 0;
    const auto from_lane = [&](i32 x) { return __shfl_sync(0xFFFFFFFFu, x, lane); };
    return {from_lane(found.batch), from_lane(found.index), from_lane(found.count)};
  }

private:
  static constexpr i32 kOfLane = 4, kAtOnce = 32 * kOfLane; // sequences that a lane, and a warp, takes at a time
  // With fewer keys per share, a block's start and end take as long as its keys. With more than kEnoughKeys, the last blocks run while much
  // of the GPU is idle. The two numbers follow from the figures of docs/lab/performance.md, "Decoding over uneven lengths"; they were not
  // measured themselves.
  static constexpr float kLeastKeys = least_keys_of_share(), kEnoughKeys = enough_keys_of_share();
  const Inputs &in_;
  i32 first_[kOfLane]; // lengths of the first sequences; usually there are no others
  float per_key_;      // shares per key

  static __device__ __forceinline__ i32 of_lane(i32 i) { return kOfLane * tile::lane_id() + i; }
  __device__ __forceinline__ i32 length(i32 b) const {
    return b < in_.batch ? min(max(in_.seqused_k[b], 0), (i32)in_.seqlen_k) : 0; // clamped, never trusted
  }
  // The number of a sequence's shares, rounded, so that sequences of equal lengths have no short shares. All sequences together have at
  // most batch + extra shares: each has at most 1 + length * per_key_, and these products add up to less than extra.
  __device__ __forceinline__ i32 of(i32 b, i32 keys) const { return b < in_.batch ? max((i32)((float)keys * per_key_ + 0.5f), 1) : 0; }
};

} // namespace strobe
