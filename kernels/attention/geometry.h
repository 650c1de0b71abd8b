// Which keys a query may see by position: causal and sliding windows, both alignments, one sequence.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

struct Range {
  i64 begin, end;
  STROBE_FN bool empty() const { return begin >= end; }
};
STROBE_FN Range intersect(Range a, Range b) { return {max(a.begin, b.begin), min(a.end, b.end)}; }

// Query i sees key j if i + low <= j <= i + high and 0 <= j < seqlen_k.
struct Band {
  static constexpr i64 kFar = 1ll << 62; // an unbounded side
  i64 seqlen_q, seqlen_k;
  i64 low, high;
  i64 offset; // of the alignment: i + offset is the key opposite query i (ALiBi's distance is |i + offset - j|)

  // left, right >= 0, or kFar and beyond for an unbounded side
  STROBE_FN static Band make(i64 seqlen_q, i64 seqlen_k, bool bottom_right, i64 left, i64 right) {
    i64 offset = bottom_right ? seqlen_k - seqlen_q : 0;
    return {seqlen_q, seqlen_k, left >= kFar ? -kFar : offset - left, right >= kFar ? kFar : offset + right, offset};
  }
  // The same relation with the roles exchanged: the queries that a key is seen by.
  STROBE_FN Band transposed() const { return {seqlen_k, seqlen_q, -high, -low, -offset}; }

  STROBE_FN bool visible(i64 i, i64 j) const { return j >= i + low && j <= i + high && j >= 0 && j < seqlen_k; }
  STROBE_FN Range keys(i64 i) const { return {max(0ll, i + low), min(seqlen_k, i + high + 1)}; }
  // Keys that some query, or that every query, of [q0, q1) sees.
  STROBE_FN Range keys_any(i64 q0, i64 q1) const { return {keys(q0).begin, keys(q1 - 1).end}; }
  STROBE_FN Range keys_all(i64 q0, i64 q1) const { return {keys(q1 - 1).begin, keys(q0).end}; }
};

} // namespace strobe::inline STROBE_ISA
