// Tile wishes (Br, Bc): how far a tile is from them, and what explain() says of the one that runs.
#pragma once
#include <cmath>

#include "attention/attention.h"
#include "attention/text.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// In powers of two; 0 without a wish.
inline double distance(int64_t wish, int64_t got) { return wish > 0 ? std::abs(std::log2(double(wish) / double(got))) : 0.0; }

// vectors: rows are copied 16 bytes at a time.
inline void describe_tile(Program &program, const Problem &p, int64_t tile_q, int64_t tile_k, bool vectors) {
  program.tile_q = tile_q, program.tile_k = tile_k;
  if (p.tile_q > 0 && p.tile_q != tile_q) program.notes.push_back(text("tile_q ", p.tile_q, " rounded to ", tile_q, ": what fits"));
  if (p.tile_k > 0 && p.tile_k != tile_k) program.notes.push_back(text("tile_k ", p.tile_k, " rounded to ", tile_k, ": what fits"));
  if (!vectors) program.notes.push_back("rows are not on 16-byte addresses with adjacent elements: copied element by element");
}

} // namespace strobe::cuda
