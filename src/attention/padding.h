// Packed tokens that belong to no sequence: those at and after the last of cu_seqlens.
#pragma once
#include "attention/attention.h"

namespace strobe {

// In host memory: out and the gradients of such tokens become 0, their LSE -inf.
void clear_padding(const Problem &, Direction);

} // namespace strobe
