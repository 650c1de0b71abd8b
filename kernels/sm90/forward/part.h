// Parts of a larger problem (attention/part.h) in the forward: which query tile an item is, and which keys are loaded for the tile. The
// calling threads have few registers: numbers have 32 bits, and tables are read again rather than kept.
#pragma once
#include "../../device/part_tiles.h"
#include "../part.h"
#include "shared.h"

namespace strobe::sm90 {

struct HeldKeyTile : BasicKeyTile<i32> {
  i32 shift; // row of K and V = position + shift
};
// The tiles of held keys that some query of an item sees, ascending. No tile crosses the border of a range. If ranges begin at multiples of
// 16, so do tiles, as dropout needs. kUnchecked: with an illegal cu_seqlens_k tiles may lie beyond the tensor, where the copy engine reads
// zeros.
template <Config C, bool kUnchecked> class HeldKeys {
public:
  __device__ __forceinline__ HeldKeys(const Inputs &in, const BasicBand<i32> &band, const Item &item)
      : in_(in), b_(item.b), any_(band.keys_any(item.q, band.seqlen_q)), all_(band.keys_all(item.q, band.seqlen_q)) {
    const i32 count = in.part->count_k;
    n_ = any_.empty() ? count : first_where(count, [&](i32 n) { return range_of_keys(in_, b_, n).end() > any_.begin; });
  }
  __device__ __forceinline__ bool next(HeldKeyTile &t) {
    while (next_ >= end_) {
      if (!next_range()) return false;
    }
    t.begin = next_, t.end = next_ = min(next_ + C.tile_k, end_), t.shift = shift_;
    t.masked = t.begin < all_.begin || t.end > all_.end;
    return true;
  }

private:
  __device__ __forceinline__ bool next_range() {
    if (n_ >= in_.part->count_k) return false;
    const HeldRange r = kUnchecked ? range_of_keys(in_, b_, n_) : held_range_of_keys(in_, b_, n_);
    ++n_;
    next_ = max(any_.begin / 16 * 16, r.start), end_ = min(any_.end, r.end()), shift_ = r.shift();
    return r.start < any_.end;
  }

  const Inputs &in_;
  i32 b_;
  BasicRange<i32> any_, all_;
  i32 n_, next_ = 0, end_ = 0, shift_ = 0;
};
// The first row, in K and V, of a tile of keys.
__device__ __forceinline__ i32 first_row(const BasicKeyTile<i32> &t) { return t.begin; }
__device__ __forceinline__ i32 first_row(const HeldKeyTile &t) { return t.begin + t.shift; }

} // namespace strobe::sm90
