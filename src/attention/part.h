// The lists of a strobe_part: which rows of the whole problem's sequences the tensors hold.
#pragma once
#include <optional>

#include "attention/reasons.h"

namespace strobe {

// Copies the lists, and adds all reasons against them. batch, heads: -1 if not known.
std::optional<Problem::Part> check_part(const strobe_part &, int64_t batch, int64_t heads, Reasons &);

// Checks that the ranges hold as many rows as each sequence has: according to cu, or `rows` rows if cu is null.
void check_held(const char *argument, const RowRange *ranges, int64_t range_batch, int64_t count, int64_t batch, const int32_t *cu,
                int64_t rows, Reasons &);
// The number of rows of the sequence with the most rows.
int64_t most_held(const RowRange *ranges, int64_t range_batch, int64_t count);

} // namespace strobe
