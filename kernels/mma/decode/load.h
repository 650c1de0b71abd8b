// The rows of a warp's tile of K and V, from global to shared memory; quantised ones are copied as 16-bit elements.
#pragma once
#include "../../device/keys.h"
#include "../../tile/copy.h"

namespace strobe::mma {

template <class Values> __device__ __forceinline__ auto rows_of(const Values &values, i64 begin, i64 end) {
  return values.rows(begin, end);
}
template <Features F, bool kByColumn>
__device__ __forceinline__ auto rows_of(const QuantisedKeys<F, kByColumn> &values, i64 begin, i64 end) {
  return values.bytes(begin, end);
}

template <class Values> inline constexpr bool kInPages = false;
template <class T> inline constexpr bool kInPages<PagedKeys<T>> = true;
template <Features F, bool kByColumn> inline constexpr bool kInPages<QuantisedKeys<F, kByColumn>> = F.seqused == kPaged;

// Rows of one page, the first of which lies `at` elements behind row 0 of page 0.
template <class T> __device__ __forceinline__ auto rows_of_page(const PagedKeys<T> &values, i64 at, i32 rows) {
  return tile::StridedMatrix<const T>{{values.first + at, values.x.stride[2], values.x.stride[3], rows, values.columns}};
}
template <Features F, bool kByColumn>
__device__ __forceinline__ auto rows_of_page(const QuantisedKeys<F, kByColumn> &values, i64 at, i32 rows) {
  return values.bytes_from(values.first + at, rows);
}

// Loads K and V of a tile by tile::load(). In pages, each row's place is read from the table, and its copy waits for that. If 16 rows lie
// in one page, as they do in pages of 16 or a multiple, one reading of the table finds these rows of K and of V.
template <int kRows, int kD, int kDv, int kThreads, bool kAligned, class K, class V>
__device__ __forceinline__ void load_rows(u32 base_k, u32 base_v, const K &k, const V &v, const KeyTile &tile, int thread) {
  constexpr int kEach = 16;
  static_assert(kRows % kEach == 0);
  if constexpr (kAligned && kInPages<K>) {
    const SequencePages &pages = k.pages;
    i32 begin[kRows / kEach], rows[kRows / kEach]; // no rows: zeros are stored
    u32 first[kRows / kEach], page[kRows / kEach];
#pragma unroll
    for (int i = 0; i < kRows / kEach; ++i) {
      begin[i] = min((i32)tile.begin + kEach * i, (i32)tile.end - 1);
      rows[i] = max(0, min(kEach, (i32)tile.end - (i32)tile.begin - kEach * i));
      first[i] = pages.number(begin[i]), page[i] = (u32)pages.table[first[i]];
    }
#pragma unroll
    for (int i = 0; i < kRows / kEach; ++i) {
      const u32 to_k = base_k + i * kEach * tile::Layout<kD>::kPitch, to_v = base_v + i * kEach * tile::Layout<kDv>::kPitch;
      if (first[i] == pages.number(begin[i] + max(rows[i], 1) - 1)) {
        const auto place = [&](const Operand &x) { return pages.offset_in(page[i], first[i], begin[i], x.stride[0], x.stride[2]); };
        tile::load<kEach, kD, kThreads, true>(to_k, rows_of_page(k, place(k.x), rows[i]), thread);
        tile::load<kEach, kDv, kThreads, true>(to_v, rows_of_page(v, place(v.x), rows[i]), thread);
      } else {
        tile::load<kEach, kD, kThreads, true>(to_k, rows_of(k, begin[i], begin[i] + rows[i]), thread);
        tile::load<kEach, kDv, kThreads, true>(to_v, rows_of(v, begin[i], begin[i] + rows[i]), thread);
      }
    }
  } else {
    tile::load<kRows, kD, kThreads, kAligned>(base_k, rows_of(k, tile.begin, tile.end), thread);
    tile::load<kRows, kDv, kThreads, kAligned>(base_v, rows_of(v, tile.begin, tile.end), thread);
  }
}

} // namespace strobe::mma
