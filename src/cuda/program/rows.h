// Steps that look at rows, not at scores: the same for all families.
#pragma once
#include "../../../kernels/attention/arguments.h"
#include "attention/attention.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

Launch combine(const Problem &, const ForwardArguments &); // the parts of a forward that was split over keys

// Of the backward, in the arithmetic of kernels/simt: D, in the order of its products; dQ from its sum; dsinks.
Launch row_sums(const Problem &, const BackwardArguments &);
Launch query_gradient(const Problem &, const BackwardArguments &);
Launch sink_gradient(const Problem &, const BackwardArguments &);

Launch padding(const Problem &, Direction); // packed tokens of no sequence: results 0, LSE -inf

} // namespace strobe::cuda
