// The oracle's evaluation of a mask function at single pairs.
#pragma once
#include <functional>

#include "attention/attention.h"

namespace strobe::oracle {

struct Place {
  int64_t b, h, i, j, offset;
};

// Whether the program's mask function lets the query see the key. captured: what it reads, which has to live as long.
std::function<bool(const Place &)> mask(const score::Program &, const Captured *captured);

} // namespace strobe::oracle
