// Steps that look at rows, not at scores: the same for all families.
#pragma once
#include "../../../kernels/attention/arguments.h"
#include "../../../kernels/passes/config.h"
#include "attention/attention.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

Launch combine(const Problem &, const ForwardArguments &); // the parts of a forward that was split over keys

// Of the backward: D, and room for dQ; dQ from its sum.
Launch delta(const Problem &, const passes::RowsConfig &, const BackwardArguments &);
Launch convert_dq(const Problem &, const passes::RowsConfig &, const BackwardArguments &);
// The same in FP32 and FP64, D in the order of dP's products; dsinks.
Launch row_sums(const Problem &, const BackwardArguments &);
Launch query_gradient(const Problem &, const BackwardArguments &);
Launch sink_gradient(const Problem &, const BackwardArguments &);

Launch padding(const Problem &, Direction); // packed tokens of no sequence: results 0, LSE -inf

} // namespace strobe::cuda
