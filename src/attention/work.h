// Estimates of the work, for predictions.
#pragma once
#include "attention/attention.h"

namespace strobe {

// The mean number of keys that a query sees by position, in a sequence of these lengths.
double mean_keys(const Problem &, int64_t seqlen_q, int64_t seqlen_k);

// The number of scores of all heads that are visible by position and blocks. For packed sequences it counts as many sequences of the
// longest length as have the same number of tokens.
double visible_scores(const Problem &);

// Whether a window covers fewer than half of the keys. A wider window counts as none.
bool narrow_window(const Problem &);

// The number of keys, of all key heads, that some query sees by position.
double keys_read(const Problem &);

// A note for explain(): max_logit and column_sums take a pass over the scores, and this pass takes `pass` of the `all` predicted seconds.
std::string auxiliary_note(const Problem &, double pass, double all);

// The multiplications and additions of the products: as OperationRecord counts them.
double flops(const Problem &, Operation);

} // namespace strobe
