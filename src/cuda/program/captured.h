// The launches that make the gradients of captured tensors, after a backward's other launches (kernels/device/captured.h).
#pragma once
#include <functional>
#include <string>

#include "../../../kernels/attention/arguments.h"
#include "../../../kernels/device/captured_config.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// How a family recomputes dS.
struct CapturedPasses {
  // What a launch sums, and of which loads; of_lines: of all loads that are summed in this way.
  struct Sums {
    Summed summed;
    LoadSet loads, of_lines;
  };
  int32_t tile_q, tile_k;
  bool of_lines;                                // whether it sums along lines; otherwise pair by pair
  int32_t diagonals_at_once;                    // the loads of a launch that sums along diagonals
  std::function<int64_t(int32_t)> table_blocks; // how many blocks fill the GPU with a table of so many elements; 0: it has no room
  std::function<Launch(const Sums &, int64_t grid, const CapturedArguments &)> launch;
  double score_seconds; // of an SM, to recompute a score's dS

  int32_t loads_at_once(Summed summed) const { return summed == kDiagonals ? diagonals_at_once : kLoadsAtOnce; }
};

// Appends the launches if gradients are wanted. Adds their time to the predicted time, and a note that says how much.
void captured_gradients(Program &, const Problem &, const Device &, const BackwardArguments &, Scratch &, const CapturedPasses &);

// The same on tensor cores. captured_refusal: the reason against, e.g. that no tile fits the GPU and the blocks of a sparse mask.
std::string captured_refusal(const Problem &, const Device &);
void captured_gradients(Program &, const Problem &, const Device &, const BackwardArguments &, Scratch &);

} // namespace strobe::cuda
