// Which tile (Br, Bc) of a family's table runs, and explain()'s note about it.
#pragma once
#include <cmath>
#include <iterator>

#include "attention/attention.h"
#include "attention/text.h"
#include "cuda/driver/device.h"
#include "cuda/program/arguments.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// cheapest() returns the table's row of least cost, or the first of equal ones. A row that cannot run costs kCannotRun; if no row can run,
// the result is null.
inline constexpr double kCannotRun = HUGE_VAL;
template <class Table, class Cost> auto cheapest(const Table &table, Cost cost) {
  decltype(&*std::begin(table)) best = nullptr;
  double least = kCannotRun;
  for (const auto &row : table)
    if (const double its = cost(row); its < least) least = its, best = &row;
  return best;
}

// How far a tile is from the requested one, in powers of two; 0 without a request.
inline double distance(int64_t wish, int64_t got) { return wish > 0 ? std::abs(std::log2(double(wish) / double(got))) : 0.0; }
inline double distance(const Problem &p, int64_t tile_q, int64_t tile_k) {
  return distance(p.wishes.tile_q, tile_q) + distance(p.wishes.tile_k, tile_k);
}

// Whether tiles lie within the blocks of a sparse mask, as block sparsity requires: along queries and, in a backward, along keys.
inline bool divides_blocks(const Problem &p, int64_t tile_q, int64_t tile_k = 1) {
  return !p.blocks.present || (p.blocks.block_q % tile_q == 0 && p.blocks.block_k % tile_k == 0);
}

// Invariant: the reason why the call is refused, if blocks of keys would make sums begin elsewhere than at multiples of tile_k; else empty.
inline std::string cuts_blocks(const Problem &p, int64_t tile_k) {
  if (!p.blocks.present || p.blocks.block_k % tile_k == 0) return {};
  return text("is invariant with blocks of multiples of ", tile_k, " keys, not ", p.blocks.block_k, ": sums begin at such keys alone");
}

inline const char *const kNoInvariantBias = "has no invariant backward with a bias: rows are settled by tiles of queries";

// Whether a 16-bit backward settles rows (kernels/device/settle_row.h). It does so if scores may be large; otherwise the rounding of P to
// 16 bits hides that of LSE. The passes that settle support no parts, and settle by tiles of queries.
inline bool settles(const Problem &p) {
  if (p.bias) return !p.part.partial;
  return features_of(p).unbounded() && !p.part && !p.invariant;
}

// How many heads run their key tiles together and share the L2 cache, in which mma.sync kernels add up dQ. In deterministic mode more heads
// run together, so that fewer tiles of one head wait for each other.
inline int32_t bundle_of_heads(bool in_turns) { return in_turns ? 16 : 4; }

// The number of tiles of dbias. An axis over which the bias is broadcast counts as one.
inline int64_t bias_tiles(const Problem &p, int64_t tile_q, int64_t tile_k) {
  const int64_t along[4] = {p.batch, p.heads, tiles(p.seqlen_q, tile_q), tiles(p.part ? p.size_k() : p.seqlen_k, tile_k)};
  int64_t count = 1;
  for (int axis = 0; axis < 4; axis++)
    if (p.dbias.stride[axis]) count *= along[axis];
  return count;
}

inline std::string no_tile(const Device &device) {
  return text("no tile fits the ", device.shared_per_block, " bytes of shared memory and divides the blocks of block_rows");
}

// vectors: rows are copied 16 bytes at a time.
inline void describe_tile(Program &program, const Problem &p, int64_t tile_q, int64_t tile_k, bool vectors) {
  program.tile_q = tile_q, program.tile_k = tile_k;
  if (p.wishes.tile_q > 0 && p.wishes.tile_q != tile_q)
    program.notes.push_back(text("tile_q ", p.wishes.tile_q, " rounded to ", tile_q, ": what fits"));
  if (p.wishes.tile_k > 0 && p.wishes.tile_k != tile_k)
    program.notes.push_back(text("tile_k ", p.wishes.tile_k, " rounded to ", tile_k, ": what fits"));
  if (!vectors) program.notes.push_back("rows are not on 16-byte addresses with adjacent elements: copied element by element");
}

// Notes that the family supports the call but has no fast kernel for such wide heads.
inline void describe_width(Program &program, const Problem &p) {
  if (wide(p))
    program.notes.push_back(text("head dimensions beyond ", kMostUsualDim, " are slow: cuda-sm90 has no kernel for them, and their sums ",
                                 "leave room for small tiles only"));
}

} // namespace strobe::cuda
