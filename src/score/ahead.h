// What many pairs share: the parts of a function that depend on i, on j or on i - j alone. GPU engines compute them before their kernels,
// once for each position or difference, and the kernels read the values (kernels/passes/ahead.h).
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "score/program.h"

namespace strobe::score {

// A node whose value is computed ahead.
struct Ahead {
  int32_t node;
  Positions by;           // kOfQuery, kOfKey or kOfDifference
  bool of_batch, of_head; // whether it depends on b, or on the offset of the sequence; and on h
  int32_t saved;          // for each pair, in instructions, about
};

// The largest such parts of a graph that are worth reading, those that save most first. cost: what a node takes, in instructions, about.
std::vector<Ahead> found_ahead(const Graph &, const std::vector<int32_t> &roots, const std::function<int32_t(int32_t node)> &cost);

} // namespace strobe::score
