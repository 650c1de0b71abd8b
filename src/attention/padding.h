// Packed tokens that belong to no sequence: those at and after the last of cu_seqlens. And keys that do not count, by seqused_k.
#pragma once
#include "attention/attention.h"

namespace strobe {

// In host memory: out and the gradients of such tokens become 0, their LSE -inf; dk and dv of such keys, too.
void clear_padding(const Problem &, Direction);

} // namespace strobe
