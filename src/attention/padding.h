// Packed tokens that belong to no sequence: those at and after the last of cu_seqlens. And keys that do not count because of seqused_k.
#pragma once
#include "attention/attention.h"

namespace strobe {

// These functions, for tensors in host memory, set out and dq of such queries to 0, their LSE to -inf, and dk, dv and column sums of such
// keys to 0.
void clear_padding_of_queries(const Problem &, const Execution &, Direction);
void clear_padding_of_keys(const Problem &, const Execution &, Direction);
inline void clear_padding(const Problem &p, const Execution &execution, Direction direction) {
  clear_padding_of_queries(p, execution, direction);
  clear_padding_of_keys(p, execution, direction);
}

} // namespace strobe
