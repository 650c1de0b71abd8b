// The choice of the query tile of the Hopper forward, and of the heads whose queries share a tile.
#pragma once
#include <optional>

#include "../../../kernels/sm90/forward/config.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"

namespace strobe::cuda {

constexpr int32_t kRowsOfPage = 16;        // pages have multiples of so many rows; key tiles begin at multiples of it
constexpr int64_t kLeastKeysOfSplit = 512; // if keys are split over thread blocks, a split has at least this many keys

// The tile with the least predicted time among those made for such heads; if a tile is requested, the nearest that fits. Invariant: the
// first that fits, whatever the lengths. Null if no tile divides the blocks of a sparse mask.
std::optional<sm90::Config> choose_tile(const Problem &, const Device &);

// The clocks in which an SM loads and dequantises a key and its value, measured on an H200: the warps that convert take a time for each
// number, and two blocks have twice as many of them; the warp that loads takes a time for each key.
inline double clocks_of_stored_key(const sm90::Config &c) {
  const double numbers = double(c.head_dim + c.head_dim_v), converting = c.blocks_per_sm > 1 ? 0.13 * numbers : 16 + 0.2 * numbers;
  return converting > 30 ? converting : 30;
}

// The rows of a warpgroup: `queries` queries of each of `heads` query heads. A key head's query heads are divided into `pieces` such
// groups.
struct HeadsOfTile {
  int64_t heads, queries, pieces;
};
// Packs query heads of a key head into shared tiles if that takes fewer scores: because queries are too few to fill tiles of one head, or
// because a tile of fewer queries sees fewer keys.
HeadsOfTile heads_of_tile(const Problem &, const sm90::Config &);

} // namespace strobe::cuda
