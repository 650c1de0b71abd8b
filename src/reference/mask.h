// The oracle's evaluation of a mask function for single pairs.
#pragma once
#include <functional>

#include "attention/attention.h"

namespace strobe::oracle {

struct Place {
  int64_t b, h, i, j, offset;
};

// Whether the program's mask function lets the query see the key. captured: the tensors that it reads; they must exist as long as the
// result.
std::function<bool(const Place &)> mask(const score::Program &, const Captured *captured);

} // namespace strobe::oracle
