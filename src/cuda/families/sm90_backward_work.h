// How the Hopper backward's work is divided among thread blocks: key tiles, bundles of heads, shares of a key head's query heads.
#pragma once
#include <algorithm>

#include "../../../kernels/sm90/backward/config.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"
#include "cuda/program/arguments.h"
#include "cuda/program/prediction.h"

namespace strobe::cuda {

// In heads of at most this dimension, a warpgroup has registers for both dK and dV of its keys, whatever the options.
constexpr int64_t kMostDimOf128Keys = 128;

constexpr double kFlopsPerSm = 560e12 / 132, kBytes = 3e12; // per second, measured on an H200

inline int64_t larger_dim(const Problem &p) { return std::max(p.head_dim, p.head_dim_v); }
// Whether heads are wider than kMostDimOf128Keys. Then a block has 64 keys, or its tiles have fewer queries.
inline bool beyond_128_keys(const Problem &p) { return larger_dim(p) > kMostDimOf128Keys; }
// The mean number of scores in the walk of a key tile over query tiles.
inline double mean_walk(const Problem &p, const sm90::BackwardConfig &c) {
  return walks(p, Operation::backward, c.tile_q, c.tile_k()).mean;
}

// The number of key tiles that may have keys. (Unless tiles are numbered, packed sequences also have empty tiles.)
int64_t tiles_with_keys(const Problem &, int64_t tile_k);
// Bytes that the blocks of a (batch, key head) pair repeatedly read and add to. They should stay in the L2 cache.
int64_t pair_bytes(const Problem &, const sm90::BackwardConfig &);
// Bytes of a block's shared memory, including the sum of dQ if a block keeps it there.
int64_t shared_bytes(const Problem &, const sm90::BackwardConfig &);
// Whether blocks are persistent with two stages of K and V, so that the next key tile loads while the current one is computed.
bool stages_keys(const Problem &, const sm90::BackwardConfig &, int64_t tiles, const Device &);
// The problem as the main launch sees it: each share of a key head's query heads counts as a key head.
Problem of_shares(const Problem &, int64_t shares);
Walks walks_of(const Problem &, const sm90::BackwardConfig &);
double predicted_seconds(const Problem &, const sm90::BackwardConfig &, int64_t shares, const Device &);
// Into how many shares a key head's query heads are divided. It is 1, unless more shares are predicted to be clearly faster because they
// fill the GPU more evenly or find more in the L2 cache. dK and dV of all shares have at most as many rows as Q. Invariant: always 1.
int64_t count_shares(const Problem &, const sm90::BackwardConfig &, const Device &);

// The work that is divided among thread blocks.
struct Work {
  int64_t shares;  // shares of a key head's query heads
  int64_t bundle;  // (batch, key head) pairs that run together
  int64_t pairs;   // (batch, key head, share) triples, counted as if the last bundle were full
  int64_t tiles_k; // key tiles of a (batch, key head) pair
  int64_t tiles_q; // query tiles of all heads and sequences
  int64_t blocks = 0;
};

// Also sets the members of the Config that depend on the amount of work.
Work share_out(sm90::BackwardConfig &, const Problem &, const Inputs &, const Device &);

} // namespace strobe::cuda
