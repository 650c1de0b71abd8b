// Which options the ladder does not support, on any device.
#pragma once
#include "attention/attention.h"

namespace strobe::ladder {

// The reason why no rung supports the problem, whatever its dtype; empty if the rungs support it.
std::string against(const Problem &);

} // namespace strobe::ladder
