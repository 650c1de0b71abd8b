// Online softmax (Milakov & Gimelshein 2018; FlashAttention's m and l), one row per lane. m is the running maximum of the scores in their
// own unit, l the sum of exp2((s - m) * unit). -inf is an ordinary value: there is no finite sentinel.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

template <class V> struct RowState {
  V m, l;
};

// The value that is subtracted from scores: m, or 0 in a row that has seen no key yet, because -inf - -inf is NaN.
template <class V> STROBE_FN V reference_of(V m, V minus_infinity) { return select(m == minus_infinity, V(0), m); }

// Updates m by a tile's maximum and multiplies l by a factor. Returns the factor, by which the caller multiplies O. m may lag behind the
// running maximum by up to `slack` (in the scores' unit). P then grows to exp2(slack * unit) at most, and most tiles need no rescaling.
template <class V> STROBE_FN V rescale(RowState<V> &row, V tile_max, V unit, V slack, V minus_infinity) {
  V m = select(row.m + slack < tile_max, tile_max, row.m);
  V alpha = exp2((row.m - reference_of(m, minus_infinity)) * unit);
  row.m = m;
  row.l *= alpha;
  return alpha;
}

} // namespace strobe::inline STROBE_ISA
