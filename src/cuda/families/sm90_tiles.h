// The choice of the query tile of the Hopper family's forward, and of the heads whose queries share it.
#pragma once
#include <optional>

#include "../../../kernels/sm90/forward/config.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"

namespace strobe::cuda {

constexpr int64_t kLeastKeysOfSplit = 512; // if keys are split over thread blocks

// Among the tiles made for such heads the one whose scores take the least time; if a tile is requested the nearest that fits. Invariant:
// the first that fits, whatever the lengths. Null if none divides the blocks of a sparse mask.
std::optional<sm90::Config> choose_tile(const Problem &, const Device &);

// Which queries a warpgroup's rows are: this many of each of this many heads. A key head's query heads come in `pieces`.
struct HeadsOfTile {
  int64_t heads, queries, pieces;
};
// Packs query heads of a key head into shared tiles where these then compute less: where queries are too few to fill tiles of one head, and
// where a tile of fewer queries sees fewer keys.
HeadsOfTile heads_of_tile(const Problem &, const sm90::Config &);

} // namespace strobe::cuda
