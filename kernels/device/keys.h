// Where the rows of K and V of a sequence lie. Dense: one sequence after another. Packed: from cu_seqlens_k on. Paged: where the table
// says. Three kernels find rows in pages themselves: simt/tile.h copies them in another way, in sm90/forward/source.h the copy engine loads
// them, and in mma/decode/ each warp copies its own rows. The CPU engines have src/cpu/keys.h.
#pragma once
#include "../attention/arguments.h"
#include "../tile/copy.h"
#include "quantised.h"

namespace strobe {

// K or V of one key head of a sequence.
template <class T> struct Keys {
  using Matrix = tile::Matrix<const T>;
  const Operand &x;
  const T *first; // row 0
  i32 columns;

  __device__ __forceinline__ Keys(const Operand &x, const T *first, i32 columns) : x(x), first(first), columns(columns) {}
  __device__ __forceinline__ Keys(const Operand &x, const Sequence &s, i64 b, i64 head, i32 columns)
      : Keys(x, x.at<const T>(b, head, s.k0, 0), columns) {}

  __device__ __forceinline__ const T *row(i64 j) const { return first + j * x.stride[2]; }
  __device__ __forceinline__ T at(i64 j, i64 c) const { return first[j * x.stride[2] + c * x.stride[3]]; }
  // The rows [begin, end), as a source from which tiles are copied.
  __device__ __forceinline__ tile::Matrix<const T> rows(i64 begin, i64 end) const {
    return {row(begin), x.stride[2], x.stride[3], (i32)end - (i32)begin, columns};
  }
};
// K or V of one key head of a sequence, in pages.
template <class T> struct PagedKeys {
  const Operand &x;
  const T *first; // row 0 of page 0
  i32 columns;
  SequencePages pages;

  __device__ __forceinline__ PagedKeys(const Operand &x, const T *first, i32 columns, const SequencePages &pages)
      : x(x), first(first), columns(columns), pages(pages) {}
  __device__ __forceinline__ PagedKeys(const Operand &x, const SequencePages &pages, i64 head, i32 columns)
      : PagedKeys(x, x.at<const T>(0, head, 0, 0), columns, pages) {}

  __device__ __forceinline__ const T *row(i32 j) const { return first + pages.offset(j, x.stride[0], x.stride[2]); }
  __device__ __forceinline__ T at(i64 j, i64 c) const { return row((i32)j)[c * x.stride[3]]; }
  struct Matrix {
    static constexpr bool kLooksUp = true;
    const PagedKeys *keys;
    i32 begin, rows, columns;
    i64 column_stride;
    __device__ __forceinline__ const T *row(i32 i) const { return keys->row(begin + min(i, rows - 1)); }
  };
  __device__ __forceinline__ Matrix rows(i64 begin, i64 end) const {
    return {this, (i32)begin, (i32)end - (i32)begin, columns, x.stride[3]};
  }
};

// lacks: whether key j is hidden because the table's entry for it is not the number of a page. lacks_some: whether a tile has such a key;
// all lanes of a warp get the same answer.
template <class T> __device__ __forceinline__ constexpr bool lacks(const Keys<T> &, i32) { return false; }
template <class T> __device__ __forceinline__ bool lacks(const PagedKeys<T> &keys, i32 j) { return keys.pages.lacks(j); }
template <class T, class KeyTile> __device__ __forceinline__ constexpr bool lacks_some(const Keys<T> &, const KeyTile &) { return false; }
template <class T, class KeyTile> __device__ __forceinline__ bool lacks_some(const PagedKeys<T> &keys, const KeyTile &tile) {
  return __any_sync(0xFFFFFFFFu, keys.pages.lacks_some((i32)tile.begin, (i32)tile.end, threadIdx.x % 32, 32)) != 0;
}

// K or V of a head, paged or not, as Features::pages says.
template <class T, Features F = Features{}>
__device__ __forceinline__ auto keys_of(const Operand &x, const Inputs &in, const Sequence &s, i64 b, i64 head, i32 columns) {
  if constexpr (F.pages)
    return PagedKeys<T>(x, in.pages.of(b), head, columns);
  else
    return Keys<T>(x, s, b, head, columns);
}
template <class T, Features F = Features{}> __device__ __forceinline__ auto k_of(const Inputs &in, const Sequence &s, i64 b, i64 head) {
  return keys_of<T, F>(in.k, in, s, b, head, in.head_dim);
}
template <class T, Features F = Features{}> __device__ __forceinline__ auto v_of(const Inputs &in, const Sequence &s, i64 b, i64 head) {
  return keys_of<T, F>(in.v, in, s, b, head, in.head_dim_v);
}
template <class T, Features F> struct KeysOf { // the type of K and V as the kernel reads them
  using type = Keys<T>;
};
template <class T, Features F>
  requires(F.pages != 0 && !F.quant)
struct KeysOf<T, F> {
  using type = PagedKeys<T>;
};
template <class T, Features F>
  requires(F.quant != 0)
struct KeysOf<T, F> {
  using type = QuantisedKeys<F, F.by_column != 0>;
};
// The rows of K, with the scales of quantised keys, from a kernel's arguments.
template <class T, Features F, class Arguments>
__device__ __forceinline__ auto k_of_call(const Arguments &a, const Sequence &s, i64 b, i64 head) {
  const Inputs &in = a.in;
  if constexpr (F.quant)
    return QuantisedKeys<F, F.by_column != 0>(in.k, a.scales.k, a.scales.half_k, a.scales.group, in, s, b, head, in.head_dim);
  else
    return k_of<T, F>(in, s, b, head);
}
template <class T, Features F, class Arguments>
__device__ __forceinline__ auto v_of_call(const Arguments &a, const Sequence &s, i64 b, i64 head) {
  const Inputs &in = a.in;
  if constexpr (F.quant)
    return QuantisedKeys<F, false>(in.v, a.scales.v, a.scales.half_v, 1, in, s, b, head, in.head_dim_v);
  else
    return v_of<T, F>(in, s, b, head);
}
// For the copy engine: the row in the maps of K and V of a sequence's row j.
template <class Rows> __device__ __forceinline__ i32 mapped_row(const Rows &s, i32 j) { return (i32)s.k0 + j; }

} // namespace strobe
