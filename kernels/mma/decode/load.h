// Loads the rows of a warp's tile of K and V from global to shared memory. Quantised rows are copied as if they were 16-bit elements.
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
template <Features F, bool kByColumn> inline constexpr bool kInPages<QuantisedKeys<F, kByColumn>> = F.pages;

// Where the rows of a warp's next tiles lie in pages, one row per lane. The page table is read one tile before the rows are loaded, so that
// no copy waits for it. Entries are kept until the tile's scales are read. Empty if the keys are not paged.
template <class K, int kStages> class PlacesAhead {
public:
  __device__ __forceinline__ PlacesAhead(const K &, const Schedule &) {}
  __device__ __forceinline__ void read(const K &, const Schedule &) {}
};
template <class K, int kStages>
  requires kInPages<K>
class PlacesAhead<K, kStages> {
  static_assert(kStages >= 2);

public:
  // tiles: the schedule, from the next tile on.
  __device__ __forceinline__ PlacesAhead(const K &k, const Schedule &tiles) { read(k, tiles); }
  __device__ __forceinline__ void read(const K &k, Schedule tiles) {
#pragma unroll
    for (int n = kStages - 1; n > 0; --n) entry_[n] = entry_[n - 1], slot_[n] = slot_[n - 1];
    KeyTile tile;
    if (!tiles.next(tile)) return;
    const i32 j = min((i32)tile.begin + tile::lane_id(), (i32)tile.end - 1);
    const u32 number = k.pages.number(j);
    entry_[0] = (u32)k.pages.table[number], slot_[0] = (u32)j - number * k.pages.page;
  }
  // row(): the offset, from row 0 of page 0, of this lane's row in the tile that is loaded next. scale(): the offset of the scale of this
  // lane's row in the tile that is multiplied next.
  template <class Values> __device__ __forceinline__ i64 row(const Values &values) const { return offset(values.pages, 0, values.x); }
  template <class Values> __device__ __forceinline__ i64 scale(const Values &values) const {
    return offset(values.pages, kStages - 1, values.scale);
  }
  // Whether a key of the next tile is missing, because the table's entry for it is not the number of a page. All lanes get the same answer.
  __device__ __forceinline__ bool lacks_some(const K &k, const KeyTile &tile) const {
    return __any_sync(0xFFFFFFFFu, (i32)tile.begin + tile::lane_id() < (i32)tile.end && entry_[0] >= k.pages.pages);
  }

private:
  u32 entry_[kStages] = {}, slot_[kStages] = {};
  __device__ __forceinline__ i64 offset(const SequencePages &pages, int n, const Operand &x) const {
    return pages.offset_of(entry_[n], slot_[n], x.stride[0], x.stride[2]);
  }
};

template <class T> __device__ __forceinline__ tile::RowsOfLanes rows_of_lanes(const PagedKeys<T> &values, i64 place, i32 rows) {
  return {values.first + place, rows, values.columns};
}
template <Features F, bool kByColumn>
__device__ __forceinline__ tile::RowsOfLanes rows_of_lanes(const QuantisedKeys<F, kByColumn> &values, i64 place, i32 rows) {
  return {values.first + place, rows, values.elements()};
}

// Loads K and V of a tile. With pages, lanes pass the addresses of rows to one another (tile::RowsOfLanes).
template <int kRows, int kD, int kDv, int kThreads, bool kAligned, class K, class V, class Places>
__device__ __forceinline__ void load_rows(u32 base_k, u32 base_v, const K &k, const V &v, const KeyTile &tile, const Places &places,
                                          int thread) {
  static_assert(kRows <= 32 || !kInPages<K>, "a lane has a row's place");
  if constexpr (kAligned && kInPages<K>) {
    const i32 rows = (i32)tile.end - (i32)tile.begin;
    tile::load<kRows, kD, kThreads, true>(base_k, rows_of_lanes(k, places.row(k), rows), thread);
    tile::load<kRows, kDv, kThreads, true>(base_v, rows_of_lanes(v, places.row(v), rows), thread);
  } else {
    tile::load<kRows, kD, kThreads, kAligned>(base_k, rows_of(k, tile.begin, tile.end), thread);
    tile::load<kRows, kDv, kThreads, kAligned>(base_v, rows_of(v, tile.begin, tile.end), thread);
  }
}

} // namespace strobe::mma
