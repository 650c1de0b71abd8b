// Which keys a query may see by position: causal and sliding windows, both alignments, one sequence.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

// Int: i64, or i32 for kernels that count in registers (positions within a sequence fit in 30 bits there).
template <class Int> struct BasicRange {
  Int begin, end;
  STROBE_FN bool empty() const { return begin >= end; }
};
template <class Int> STROBE_FN BasicRange<Int> intersect(BasicRange<Int> a, BasicRange<Int> b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}
using Range = BasicRange<i64>;

// Query i sees key j if i + low <= j <= i + high and 0 <= j < seqlen_k.
template <class Int> struct BasicBand {
  using Range = BasicRange<Int>;
  static constexpr i64 kFar = 1ll << 62; // a side without a bound
  Int seqlen_q, seqlen_k;
  Int low, high;
  Int offset; // i + offset is the key opposite query i, as the alignment says; ALiBi's distance is |i + offset - j|

  // left, right: >= 0; kFar or more means no bound
  STROBE_FN static BasicBand make(i64 seqlen_q, i64 seqlen_k, bool bottom_right, i64 left, i64 right) {
    i64 offset = bottom_right ? seqlen_k - seqlen_q : 0;
    return {seqlen_q, seqlen_k, left >= kFar ? -kFar : offset - left, right >= kFar ? kFar : offset + right, offset};
  }
  // The band with the roles of queries and keys exchanged: the queries to which a key is visible.
  STROBE_FN BasicBand transposed() const { return {seqlen_k, seqlen_q, -high, -low, -offset}; }

  STROBE_FN bool visible(Int i, Int j) const { return j >= i + low && j <= i + high && j >= 0 && j < seqlen_k; }
  STROBE_FN Range keys(Int i) const { return {max(Int(0), i + low), min(seqlen_k, i + high + 1)}; }
  // The keys that some query of [q0, q1) sees; and the keys that every query of it sees.
  STROBE_FN Range keys_any(Int q0, Int q1) const { return {keys(q0).begin, keys(q1 - 1).end}; }
  STROBE_FN Range keys_all(Int q0, Int q1) const { return {keys(q1 - 1).begin, keys(q0).end}; }
};
using Band = BasicBand<i64>;

// The band b in 32 bits; bounds that are too far away for them are limited.
STROBE_FN BasicBand<i32> narrow(const Band &b) {
  constexpr i64 kMost = (1ll << 30) - 1;
  return {(i32)b.seqlen_q, (i32)b.seqlen_k, (i32)max(b.low, -kMost), (i32)min(b.high, kMost), (i32)b.offset};
}

} // namespace strobe::inline STROBE_ISA
