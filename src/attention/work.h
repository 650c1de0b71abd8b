// How much there is to compute, for predictions.
#pragma once
#include "attention/attention.h"

namespace strobe {

// Scores of all heads that are visible by position and blocks: causal halves, a window bounds, a sparse mask keeps its share.
double visible_scores(const Problem &);

// Keys of all key heads that some query sees by position.
double keys_read(const Problem &);

// Multiplications and additions of the products: two forward, five backward.
double flops(const Problem &, Direction);

} // namespace strobe
