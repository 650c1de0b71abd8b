// The fp64 oracle: the contract's formulas (docs/semantics.md), row by row and column by column. It shares no code with any engine.
#pragma once
#include "engine.h"

namespace strobe {

// The engine "reference", by name only.
const Engine *reference_engine();

// strobe_reference_forward and strobe_reference_backward after validation: inputs of any float dtype, every output float64.
//
// A selection (null: everything) limits what is computed and written: forward to `rows`; backward to `rows` of dq and `cols` of dk and dv.
// Selected rows cost O(rows * Sk * (D + Dv)). A selected column needs the LSE and D = sum dO * O of each query that sees it: if cols are
// given and the problem has both lse and out, these are used; otherwise each such query is computed from scratch, O(Sk * (D + Dv)) each.
// Everywhere else the backward computes its own O and LSE and reads neither. dbias and dsinks are sums over all rows: an error with rows.
// Throws Refused on a bad selection, before anything is written.
void reference(const Problem &, const Execution &, Direction, const strobe_selection *);

} // namespace strobe
