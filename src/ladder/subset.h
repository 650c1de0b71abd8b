// What the ladder leaves out, on either device.
#pragma once
#include "attention/attention.h"

namespace strobe::ladder {

// Why no rung takes the problem, whatever its dtype; empty if they do.
std::string against(const Problem &);

} // namespace strobe::ladder
