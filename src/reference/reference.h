// The fp64 oracle: the contract's formulas (docs/semantics.md), row by row and column by column. It shares no code with any engine.
#pragma once
#include "engine.h"

namespace strobe {

// The engine "reference", by name only.
const Engine *reference_engine();

// strobe_reference_forward and strobe_reference_backward after validation: inputs of any float dtype, every output float64.
//
// A selection (null: everything) limits what is computed and written: forward to `rows`; backward to `rows` of dq and `cols` of dk and dv.
// The cost of the selected rows is proportional to rows * Sk * (D + Dv). A selected column needs LSE and delta = rowsum(dO * O) of each
// query that sees it. If cols are given and the problem has both lse and out, these tensors are used; otherwise each such query is computed
// from scratch, at a cost proportional to Sk * (D + Dv). Unless cols are given with both, the backward computes O and LSE itself and reads
// neither. dbias and dsinks sum over all rows, so asking for them with `rows` is an error. Throws Refused on a bad selection, before
// anything is written.
void reference(const Problem &, const Execution &, Direction, const strobe_selection *);

} // namespace strobe
