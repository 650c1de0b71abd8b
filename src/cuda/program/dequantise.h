// The pass that dequantises K and V into the workspace (kernels/passes/dequantise.h), for engines that then read 16 bits.
#pragma once
#include "attention/attention.h"
#include "cuda/driver/device.h"
#include "cuda/program/addresses.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// A call as it is after the pass: k and v in q's dtype, in the workspace, with the same rows or pages. If the call's table has fewer pages
// than the pools, each sequence has pages of its own there, and a new table.
struct Dequantised {
  Problem problem;
  Launch launch;
};
// Reserves memory. Sequences with fewer than least_queries queries are left out: their keys are undefined.
Dequantised dequantise(const Problem &, Scratch &, int64_t least_queries);
// The bytes of k and v in q's dtype that dequantise() reserves, besides a table.
int64_t dequantised_bytes(const Problem &);
// The predicted seconds of the pass, if it dequantises `keys` keys, counted over key heads.
double dequantising_seconds(const Problem &, const Device &, double keys);

} // namespace strobe::cuda
