// What thread blocks of the Hopper backward share out: tiles of keys, bundles of heads, shares of a key head's query heads.
#pragma once
#include <algorithm>

#include "../../../kernels/sm90/backward/config.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"
#include "cuda/program/arguments.h"
#include "cuda/program/prediction.h"

namespace strobe::cuda {

// The widest head that leaves a warpgroup registers for both dK and dV of its keys, whatever the options.
constexpr int64_t kMostDimOf128Keys = 128;

constexpr double kFlopsPerSm = 560e12 / 132, kBytes = 3e12; // measured on an H200

inline int64_t larger_dim(const Problem &p) { return std::max(p.head_dim, p.head_dim_v); }
// Are heads wider than that? Then 64 keys a block, or fewer queries a tile.
inline bool beyond_128_keys(const Problem &p) { return larger_dim(p) > kMostDimOf128Keys; }
// Scores in the walk of a tile of keys over tiles of queries, on average.
inline double mean_walk(const Problem &p, const sm90::BackwardConfig &c) {
  return walks(p, Direction::backward, c.tile_q, c.tile_k()).mean;
}

// All tiles that may have keys: packed sequences that are not numbered have empty ones as well.
int64_t tiles_with_keys(const Problem &, int64_t tile_k);
// What a (batch, key head) pair reads, and adds up, time after time.
int64_t pair_bytes(const Problem &, const sm90::BackwardConfig &);
// Bytes of a block's shared memory, with the sum of dQ that may be there.
int64_t shared_bytes(const Problem &, const sm90::BackwardConfig &);
// Do blocks take one of these tiles of keys after the other, in two stages of K and V, so that the next ones come while these are read?
bool stages_keys(const Problem &, const sm90::BackwardConfig &, int64_t tiles, const Device &);
// As the main launch sees it: each share of a key head's query heads has a key head of its own.
Problem of_shares(const Problem &, int64_t shares);
Walks walks_of(const Problem &, const sm90::BackwardConfig &);
double predicted_seconds(const Problem &, const sm90::BackwardConfig &, int64_t shares, const Device &);
// In how many shares thread blocks take the query heads of a key head: in one, unless several are predicted to be clearly faster, since
// they fill the GPU more evenly or find more in the L2 cache. Their dK and dV may have as many rows as Q. Invariant: lengths have no say.
int64_t count_shares(const Problem &, const sm90::BackwardConfig &, const Device &);

// What thread blocks share out among them.
struct Work {
  int64_t shares;  // of a key head's query heads
  int64_t bundle;  // of pairs, which come together
  int64_t pairs;   // (batch, key head), once for each share; as if the last bundle were full
  int64_t tiles_k; // of a pair
  int64_t tiles_q; // of all heads and sequences
  int64_t blocks = 0;
};

// Also decides what of the Config follows from how much work there is.
Work share_out(sm90::BackwardConfig &, const Problem &, const Inputs &, const Device &);

} // namespace strobe::cuda
