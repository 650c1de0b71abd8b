// The options that the ladder leaves out, on either device.
#pragma once
#include "attention/attention.h"

namespace strobe::ladder {

// The reason why no rung supports the problem, whatever its dtype; empty if the rungs do.
std::string against(const Problem &);

} // namespace strobe::ladder
