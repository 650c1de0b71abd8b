// Which keys of a sequence a query may see by position: causal masks and sliding windows, in both alignments.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

// Int: i64, or i32 in kernels that keep positions in registers (there positions within a sequence fit 30 bits).
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
  static constexpr i64 kFar = 1ll << 62; // the bound of a side that has none
  Int seqlen_q, seqlen_k;
  Int low, high;
  Int offset; // i + offset is the key opposite query i, as the alignment says

  // left, right: >= 0; kFar or more: no bound
  STROBE_FN static BasicBand make(i64 seqlen_q, i64 seqlen_k, bool bottom_right, i64 left, i64 right) {
    i64 offset = bottom_right ? seqlen_k - seqlen_q : 0;
    return {seqlen_q, seqlen_k, left >= kFar ? -kFar : offset - left, right >= kFar ? kFar : offset + right, offset};
  }
  // The band with queries and keys exchanged: it says which queries see a key.
  STROBE_FN BasicBand transposed() const { return {seqlen_k, seqlen_q, -high, -low, -offset}; }

  STROBE_FN bool visible(Int i, Int j) const { return j >= i + low && j <= i + high && j >= 0 && j < seqlen_k; }
  STROBE_FN Range keys(Int i) const { return {max(Int(0), i + low), min(seqlen_k, i + high + 1)}; }
  // keys_any: the keys that some query of [q0, q1) sees. keys_all: the keys that every query of [q0, q1) sees.
  STROBE_FN Range keys_any(Int q0, Int q1) const { return {keys(q0).begin, keys(q1 - 1).end}; }
  STROBE_FN Range keys_all(Int q0, Int q1) const { return {keys(q1 - 1).begin, keys(q0).end}; }
};
using Band = BasicBand<i64>;

// The band b in 32 bits. Bounds that do not fit are limited.
STROBE_FN BasicBand<i32> narrow(const Band &b) {
  constexpr i64 kMost = (1ll << 30) - 1;
  return {(i32)b.seqlen_q, (i32)b.seqlen_k, (i32)max(b.low, -kMost), (i32)min(b.high, kMost), (i32)b.offset};
}

} // namespace strobe::inline STROBE_ISA
