// The launch that computes what many pairs of the caller's functions share (kernels/passes/ahead.h).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "cuda/driver/device.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// Takes memory for the values, which Problem::ahead then names; no launch if the functions share nothing that pays.
std::optional<Launch> compute_ahead(Problem &, Scratch &);
// How long that launch takes; 0 if there is none.
double ahead_seconds(const Problem &, const Device &);
// Notes for explain().
std::vector<std::string> ahead_in_words(const Problem &);

} // namespace strobe::cuda
