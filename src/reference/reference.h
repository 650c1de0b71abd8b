// The FP64 oracle: the formulas of the contract (docs/semantics.md), row by row and column by column. It shares no code with any engine.
#pragma once
#include "engine.h"

namespace strobe {

// The engine "reference", which runs only if asked for by name.
const Engine *reference_engine();

// strobe_reference_forward and strobe_reference_backward, after validation. Inputs have any float dtype; every output is float64.
//
// A selection (null: everything) limits what is computed and written: `rows` in the forward; `rows` of dq and `cols` of dk and dv in the
// backward. The cost of the selected rows is proportional to rows * Sk * (D + Dv). A selected column needs LSE and delta = rowsum(dO * O)
// of each query that sees it. If cols are given and the problem has both lse and out, these tensors are used. Otherwise the backward reads
// neither; it computes O and LSE of each query that it needs, at a cost proportional to Sk * (D + Dv). dbias and dsinks sum over all rows,
// so asking for them with `rows` is an error. Throws Refused on a bad selection, before anything is written.
void reference(const Problem &, const Execution &, Operation, const strobe_selection *);

} // namespace strobe
