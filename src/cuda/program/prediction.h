// What the predictions of all families share: how many scores whole tiles compute, and how thread blocks share the GPU.
#pragma once
#include "../../../kernels/attention/geometry.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"

namespace strobe::cuda {

// Thread blocks that each own a tile of a head's queries (backward: keys) and walk over the keys (backward: queries) by tiles.
struct Walks {
  double blocks = 0;            // blocks of all heads
  double mean = 0, longest = 0; // scores per block

  double scores() const { return blocks * mean; }
  // Blocks run concurrently in `slots` slots. The scores that one slot computes until all blocks are done.
  double last(double slots) const;
};
Walks walks(const Problem &, Operation, int64_t tile_q, int64_t tile_k);

// The walks of the tiles of one sequence. A tile of `own` rows walks over the columns that its rows see, in whole tiles of `step` columns
// from a multiple of `align` on. In a long sequence only about `samples` tiles are computed.
struct Walked {
  int64_t tiles = 0;
  double mean = 0, longest = 0; // columns per tile
};
Walked walked(const Band &, int64_t own, int64_t step, int64_t align, int64_t samples);

// How many blocks an SM runs at a time; at most `most`, for which registers have room.
int64_t resident(const Device &, int64_t shared_bytes, int64_t most);

// The seconds until all blocks are done. `resident` blocks share an SM, which computes `rate` scores per second. Each block takes
// block_seconds more, to begin and to store. `parts` blocks share a walk.
double seconds(const Walks &, const Device &, int64_t resident, double rate, double block_seconds, int64_t parts = 1);

// Figures measured for a family whose blocks compute every score by the same operations. Arrays: forward, backward.
struct Measured {
  double share_of_peak[2]; // fraction of Workload::rate that is reached
  double launch_seconds;   // per kernel
  double block_seconds[2]; // per block, to begin and to store
};
struct Workload {
  const Problem &problem;
  Operation operation;
  const Device &device;
  double rate, operations; // rate: operations per clock and SM; operations: for one score and column of Q or V, in one product
  int64_t resident;
  size_t launches;
  int64_t parts;
};
double seconds(const Workload &, const Measured &, int64_t tile_q, int64_t tile_k, int64_t head_dim, int64_t head_dim_v);

// How many (batch, head) pairs run their tiles together in a forward: as many as keep their K and V in half of the L2 cache.
int32_t pairs_in_half_the_cache(const Problem &, const Device &);

double query_rows(const Problem &); // rows of all query heads
double key_rows(const Problem &);   // rows of all key heads

// Forward: the seconds to read K and V from memory; and the seconds of the pass that combines splits.
double reading_seconds(const Problem &, const Device &);
double combining_seconds(const Problem &);

// The seconds of a backward's passes over rows of Q. They read O and dO for D and, with dq_sums, clear and round dQ's FP32 sums.
double rows_seconds(const Problem &, int64_t head_dim, int64_t head_dim_v, bool dq_sums = true);

// The seconds in which a backward reloads the tiles of Q, dO and dQ (row_bytes per query) that the L2 cache has dropped. Concurrent blocks
// walk over the rows of `pairs` (batch, key head) pairs at a time. They find rows in the cache if they reach them at about the same time.
double missing_seconds(const Problem &, const Walks &, const Device &, int64_t tile_k, int64_t pairs, int64_t row_bytes);

} // namespace strobe::cuda
