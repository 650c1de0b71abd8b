// How much there is to compute, for predictions.
#pragma once
#include "attention/attention.h"

namespace strobe {

// Keys that a query sees by position, in the mean over a sequence of these lengths.
double mean_keys(const Problem &, int64_t seqlen_q, int64_t seqlen_k);

// Scores of all heads that are visible by position and blocks; packed sequences count as so many of the longest as have their tokens.
double visible_scores(const Problem &);

// Is there a window of fewer than half of the keys? A wider one is as good as none.
bool narrow_window(const Problem &);

// Keys of all key heads that some query sees by position.
double keys_read(const Problem &);

// For explain(): that max_logit and column_sums cost a pass over the scores, of so many of the seconds that are predicted.
std::string auxiliary_note(const Problem &, double pass, double all);

// Multiplications and additions of the products: two forward, five backward.
double flops(const Problem &, Direction);

} // namespace strobe
