// Where the rows of K and V of a sequence lie. Dense: batch after batch; packed: a sequence's tokens from cu_seqlens_k on. A page table
// would begin here, in row(), rows() and mapped_row(), and not end here: some callers ask once where row 0 is and count on from there, and
// would have to ask for each tile. They are sm90/forward/load.h (mapped_row once an item), tf32/forward.h (keeps `first`) and simt/tile.h
// (Rows copies it). The CPU engines have src/cpu/keys.h.
#pragma once
#include "../attention/arguments.h"
#include "../tile/copy.h"

namespace strobe {

// K or V of one key head of a sequence.
template <class T> struct Keys {
  const Operand &x;
  const T *first; // row 0
  i32 columns;

  __device__ __forceinline__ Keys(const Operand &x, const T *first, i32 columns) : x(x), first(first), columns(columns) {}
  __device__ __forceinline__ Keys(const Operand &x, const Sequence &s, i64 b, i64 head, i32 columns)
      : Keys(x, x.at<const T>(b, head, s.k0, 0), columns) {}

  __device__ __forceinline__ const T *row(i64 j) const { return first + j * x.stride[2]; }
  __device__ __forceinline__ T at(i64 j, i64 c) const { return first[j * x.stride[2] + c * x.stride[3]]; }
  // Rows [begin, end), as tiles are copied from.
  __device__ __forceinline__ tile::Matrix<const T> rows(i64 begin, i64 end) const {
    return {row(begin), x.stride[2], x.stride[3], (i32)end - (i32)begin, columns};
  }
};
template <class T> __device__ __forceinline__ Keys<T> k_of(const Inputs &in, const Sequence &s, i64 b, i64 head) {
  return {in.k, s, b, head, in.head_dim};
}
template <class T> __device__ __forceinline__ Keys<T> v_of(const Inputs &in, const Sequence &s, i64 b, i64 head) {
  return {in.v, s, b, head, in.head_dim_v};
}
// The same for the copy engine: row j of a sequence among those of its maps of K and V.
template <class Rows> __device__ __forceinline__ i32 mapped_row(const Rows &s, i32 j) { return (i32)s.k0 + j; }

} // namespace strobe
