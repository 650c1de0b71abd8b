// Which form of the Hopper backward runs: what a thread block owns, its tiles, and what it holds in registers.
#pragma once
#include "../../../kernels/sm90/backward/config.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"

namespace strobe::cuda {

// The Config, except for the members that share_out() sets.
sm90::BackwardConfig choose_form(const Problem &, const Features &, const Device &);

} // namespace strobe::cuda
