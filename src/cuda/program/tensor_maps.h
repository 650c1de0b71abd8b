// Tensors as the copy engine of Hopper sees them.
#pragma once
#include <string>

#include "../../../kernels/sm90/arguments.h"
#include "attention/attention.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// Why the copy engine cannot fetch it; empty if it can.
std::string unmapped(const char *argument, const View &, int64_t columns);

// box: rows fetched at a time, 64 columns each. Without a map where the call is only planned.
MappedOperand mapped(const Scratch &, const View &, int64_t columns, int64_t rows, int64_t heads, int64_t batch, uint32_t box);

} // namespace strobe::cuda
