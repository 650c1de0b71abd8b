// Steps of a backward on tensor cores that compute tiles of scores anew: kernels/passes/settle.h and bias_gradient.h, FP16, BF16, and FP32
// by TF32.
#pragma once
#include <optional>

#include "../../../kernels/attention/arguments.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// Nothing where no tile fits. Where an LSE is large, corrects its row's D and writes LSE's correction; after D.
std::optional<Launch> settle(const Problem &, const Device &, const BackwardArguments &);
std::optional<Launch> bias_gradient(const Problem &, const Device &, const BackwardArguments &);

} // namespace strobe::cuda
