// Padding: packed tokens at or after the last entry of cu_seqlens, which belong to no sequence; and keys that seqused_k leaves out.
#pragma once
#include "attention/attention.h"

namespace strobe {

// For tensors in host memory. For queries of padding, out, tout, tlse and dq become 0 and LSE becomes -inf; for keys of padding, dk, dv and
// column sums become 0.
void clear_padding_of_queries(const Problem &, const Execution &, Operation);
void clear_padding_of_keys(const Problem &, const Execution &, Operation);
inline void clear_padding(const Problem &p, const Execution &execution, Operation operation) {
  clear_padding_of_queries(p, execution, operation);
  clear_padding_of_keys(p, execution, operation);
}

} // namespace strobe
