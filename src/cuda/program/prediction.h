// What the families' predictions share: how much whole tiles compute, and how thread blocks share the GPU.
#pragma once
#include "../../../kernels/attention/geometry.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"

namespace strobe::cuda {

// Thread blocks that each own a tile of a head's queries (forward) or keys (backward) and walk over the others by tiles.
struct Walks {
  double blocks = 0;            // of all heads
  double mean = 0, longest = 0; // scores per block

  double scores() const { return blocks * mean; }
  // For one of `slots` slots in which blocks run concurrently: the scores until all blocks are done.
  double last(double slots) const;
};
Walks walks(const Problem &, Direction, int64_t tile_q, int64_t tile_k);

// Tiles of `own` rows of one sequence, each of which walks over whole tiles of `step` columns, from a multiple of `align` on, over what its
// rows see. In a long sequence about `samples` tiles are looked at.
struct Walked {
  int64_t tiles = 0;
  double mean = 0, longest = 0; // columns
};
Walked walked(const Band &, int64_t own, int64_t step, int64_t align, int64_t samples);

// Blocks that an SM runs at a time; registers have room for at most `most`.
int64_t resident(const Device &, int64_t shared_bytes, int64_t most);

// The time until all blocks are done: `resident` of them share an SM, which computes `rate` scores per second; a block takes
// `block_seconds` more, to begin and to store; `parts` blocks share a walk.
double seconds(const Walks &, const Device &, int64_t resident, double rate, double block_seconds, int64_t parts = 1);

// A family whose blocks compute each score by the same operations. Forward and backward, as measured:
struct Measured {
  double share_of_peak[2]; // of the rate
  double launch_seconds;   // per kernel
  double block_seconds[2]; // per block, to begin and to store
};
struct Workload {
  const Problem &problem;
  Direction direction;
  const Device &device;
  double rate, operations; // rate: of an SM, per clock; operations: per score, for each column of Q and of V in one product
  int64_t resident;
  size_t launches;
  int64_t parts;
};
double seconds(const Workload &, const Measured &, int64_t tile_q, int64_t tile_k, int64_t head_dim, int64_t head_dim_v);

// (batch, head) pairs whose tiles run together in a forward: their K and V should stay in half of the L2 cache.
int32_t pairs_in_half_the_cache(const Problem &, const Device &);

double query_rows(const Problem &); // of all heads
double key_rows(const Problem &);   // of all key heads

// Forward: K and V from memory, and the pass that combines splits.
double reading_seconds(const Problem &, const Device &);
double combining_seconds(const Problem &);

// The passes of a backward over rows of Q: reads O and dO for D; dq_sums: clears dQ's FP32 sums and rounds them.
double rows_seconds(const Problem &, int64_t head_dim, int64_t head_dim_v, bool dq_sums = true);

// The time in which a backward loads again tiles of Q, dO and dQ that the L2 cache has lost, row_bytes per query: concurrent blocks walk
// over the same rows, those of `pairs` (batch, key head) pairs at a time, and find them in the cache if they do so at about the same time.
double missing_seconds(const Problem &, const Walks &, const Device &, int64_t tile_k, int64_t pairs, int64_t row_bytes);

} // namespace strobe::cuda
