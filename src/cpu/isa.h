// The functions that an instruction set's translation unit provides. Such a unit is compiled for that set, so it must not emit inline
// functions that other units share: the linker could choose its copy for a CPU without the set. Its own code has its own namespace
// (STROBE_ISA), code from elsewhere is always_inline, and tests/cpp checks the symbols of the object files.
#pragma once
#include <string>

#include "attention/attention.h"
#include "score/bytecode.h"

namespace strobe {

struct TileSizes {
  int64_t q, k;  // Br, a multiple of 16, and Bc, a multiple of 32
  int64_t width; // lanes processed at once: query tiles are cut into pieces of this width
};

inline constexpr int64_t kLongestTileQ = 256, kLongestTileK = 512;
inline constexpr int64_t kMostDecodedRows = 128; // most rows of a group of heads: each thread holds their scores

struct CpuKernels {
  const char *arithmetic;         // a description
  bool quantised;                 // every forward reads quantised K and V (not with bf16 products, which would round the values)
  int64_t decodes_quantised_from; // if not: decoding reads them for groups of at least this many rows, and scales S and P; 0: never
  int64_t rows_in_place;          // decoding reads K and V in place for groups of at most this many rows
  int planes;                     // how many bf16 a number is split into (the smallest products are left out); 0: not split
  // The main pass of each operation; null: it has none. tiles: used if none is requested.
  PerOperation<TileSizes> tiles;
  PerOperation<int64_t (*)(const Problem &, const TileSizes &, int64_t threads)> workspace;
  PerOperation<void (*)(const Problem &, const Execution &, const TileSizes &, void *workspace)> run;
  // The forward of few queries (decode.h).
  int64_t decode_keys; // keys per item
  int64_t (*decode_workspace)(const Problem &, int64_t threads);
  void (*decode)(const Problem &, const Execution &, void *workspace);
  // max_logit and column_sums, after a forward with the same tile.
  int64_t (*auxiliary_workspace)(const Problem &, const TileSizes &, int64_t threads);
  void (*auxiliary)(const Problem &, const Execution &, const TileSizes &, void *workspace);
  // Runs the caller's functions (program.h). Null if no instruction of this set serves them; avx512's FP32 kernels then do.
  decltype(score::Bytecode::run) run_program;
};

struct InstructionSet {
  const char *name;                    // the engine's name
  std::string (*missing)();            // why this machine cannot run it; empty if it can
  const CpuKernels *(*kernels)(DType); // null if the set gains nothing for this dtype
  // The other members serve only the prediction. Arrays: fp32 (fp64: half the rate), fp16, bf16.
  double flops_per_cycle[3]; // with full pieces; a multiply-add counts as two
  double idle_lanes;         // what a piece costs besides its lanes, in lanes: each piece reads K and V once, however narrow it is
  double pack_cycles[3];     // cycles to pack an element of K or V
};

} // namespace strobe
