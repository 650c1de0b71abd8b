// What the translation unit of an instruction set offers. Such a unit is compiled for that set, so nothing inline that other units share
// may come out of it: the linker could choose its copy for a CPU without the set. Its own code lives in a namespace of its own
// (STROBE_ISA), what it includes from elsewhere is always_inline, and tests/cpp checks the object files' symbols.
#pragma once
#include <string>

#include "attention/attention.h"

namespace strobe {

struct TileSizes {
  int64_t q, k;  // Br, a multiple of 16, and Bc, of 32
  int64_t width; // lanes worked on at once: a tile of queries is cut into pieces of so many
};

inline constexpr int64_t kMostDecodedRows = 128; // of a group of heads: each thread holds their scores

struct CpuKernels {
  const char *arithmetic;                // in words
  bool quantised;                        // whether every forward reads quantised K and V: bf16 products would round what these stand for
  int64_t decodes_quantised_from;        // else decoding reads them if a group has at least so many rows, and scales S and P; 0: never
  int64_t rows_in_place;                 // decoding reads K and V as they lie if a group has at most so many rows
  int planes;                            // bf16 that a number is split into, whose smallest products are left out; 0: it is not split
  TileSizes forward_tile, backward_tile; // where nothing else is wished
  int64_t (*forward_workspace)(const Problem &, const TileSizes &, int64_t threads);
  void (*forward)(const Problem &, const Execution &, const TileSizes &, void *workspace);
  // The forward of few queries (decode.h).
  int64_t decode_keys; // of an item
  int64_t (*decode_workspace)(const Problem &, int64_t threads);
  void (*decode)(const Problem &, const Execution &, void *workspace);
  int64_t (*backward_workspace)(const Problem &, const TileSizes &, int64_t threads);
  void (*backward)(const Problem &, const Execution &, const TileSizes &, void *workspace);
  // max_logit and column_sums, after a forward of the same tile.
  int64_t (*auxiliary_workspace)(const Problem &, const TileSizes &, int64_t threads);
  void (*auxiliary)(const Problem &, const Execution &, const TileSizes &, void *workspace);
};

struct InstructionSet {
  const char *name;                    // of the engine
  std::string (*missing)();            // why this machine cannot run it; empty if it can
  const CpuKernels *(*kernels)(DType); // null where the set adds nothing for this type
  // For the predicted time alone; {fp32 (fp64: half the rate), fp16, bf16}.
  double flops_per_cycle[3]; // where pieces are full, a multiply-add two
  double idle_lanes;         // what a piece costs beside its lanes, in lanes: K and V are read once a piece, however narrow it is
  double pack_cycles[3];     // of an element of K or V
};

} // namespace strobe
