// Which tile of queries the forward of the Hopper family takes, and whose queries its rows are.
#pragma once
#include <optional>

#include "../../../kernels/sm90/forward/config.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"

namespace strobe::cuda {

constexpr int64_t kLeastKeysOfPart = 512; // where keys are split over blocks of threads

// Of the tiles made for such heads the one whose scores take the least time; with wishes the nearest that fits. Invariant: the first that
// fits, whatever the lengths. Null where none divides the blocks of a sparse mask.
std::optional<sm90::Config> choose_tile(const Problem &, const Device &);

// Whose queries a warpgroup's rows are: so many of each of so many heads. A key head's query heads come in `pieces`.
struct HeadsOfTile {
  int64_t heads, queries, pieces;
};
// Query heads of a key head share tiles where these then compute less: where queries are too few to fill tiles of one head, and where a
// tile of fewer queries sees fewer keys.
HeadsOfTile heads_of_tile(const Problem &, const sm90::Config &);

} // namespace strobe::cuda
