// Steps of the backward that other families take from kernels/simt: they look at rows, or seldom run.
#pragma once
#include "../../kernels/attention/arguments.h"
#include "attention/attention.h"
#include "cuda/device.h"
#include "cuda/program.h"

namespace strobe::cuda {

// Where an LSE is large, corrects its row's D and says what LSE lacks. After D.
Launch settle(const Problem &, const Device &, const BackwardArguments &);
Launch sink_gradient(const Problem &, const BackwardArguments &);

} // namespace strobe::cuda
