// The table of a part of a larger problem. Kernels read it in the workspace (kernels/attention/part.h).
#pragma once
#include <vector>

#include "attention/attention.h"
#include "cuda/program/addresses.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// Copies up to kMostWords words of its arguments to memory: a launch, and a graph that has captured it, hold copies of them.
inline constexpr KernelSource kWriteWords{"passes/part_table.h", "strobe::passes::WriteWords", "strobe::passes::WordsConfig"};

// Reserves memory for the table, sets p.part.table, and returns the launches that write it: one, or several if there are hundreds of
// ranges.
std::vector<Launch> part_table(Problem &p, Scratch &);
// Whether all ranges begin at multiples of 16, so that dropout's groups and mask blocks lie at the same places as in the whole sequences.
bool begins_aligned(const Problem &);
// Whether tiles are numbered through all sequences (kernels/attention/packed_tiles.h), so that a short sequence has only the tiles that it
// fills.
inline bool numbers_tiles(const Problem &p) { return p.varlen && !p.part; }
// Whether numbering tiles pays in kernels whose blocks must then search for their tiles. The search takes 0.5 µs on an H200. True if
// numbering halves the number of blocks: without it, each sequence has as many tiles as the longest one. rows: the rows of all sequences.
bool worth_numbering(const Problem &, int64_t rows, int64_t longest, int64_t tile);

// How many query (key) tiles the sequence with the most tiles has, counted as in kernels.
int64_t query_tiles(const Problem &, int64_t tile);
int64_t key_tiles(const Problem &, int64_t tile);
int64_t all_query_tiles(const Problem &, const Inputs &, int64_t tile); // over all heads and sequences: the size of dq_sum

} // namespace strobe::cuda
