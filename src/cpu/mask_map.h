// What the mask does to cells of queries x keys. The mask is read once per call, even if heads share it. All heads and passes then skip
// hidden cells, and compute fully visible cells as if there were no mask.
#pragma once
#include "query_tiles.h"
#include "tile.h"

namespace strobe::inline STROBE_ISA {

inline constexpr int64_t kKeyAlign = 32; // pieces of a key tile begin at multiples of this, counted from the tile's first key

STROBE_INLINE int64_t pieces_of(const TileSizes &tile) { return (tile.q + tile.width - 1) / tile.width; }

// What the mask does to a cell; for several cells, the union.
inline constexpr uint8_t kSeen = 1, kHidden = 2; // some element is visible; some element is hidden

// What the mask does to a cell of rows x columns bytes; 0 if the cell is empty.
inline uint8_t classify(const uint8_t *at, int64_t rows, int64_t row_stride, int64_t columns, int64_t stride) {
  if (stride != 1 && row_stride == 1) return classify(at, columns, stride, rows, 1);
  uint8_t least[kKeyAlign], most[kKeyAlign] = {};
  fill(least, kKeyAlign, uint8_t(1));
  auto look = [&](int64_t lane, uint8_t x) __attribute__((always_inline)) {
    least[lane] = x < least[lane] ? x : least[lane];
    most[lane] |= x;
  };
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t *row = at + r * row_stride;
    int64_t c = 0;
    __builtin_prefetch(row + 4 * kKeyAlign); // the next rows lie far apart
    for (; stride == 1 && c + kKeyAlign <= columns; c += kKeyAlign)
      for (int64_t lane = 0; lane < kKeyAlign; ++lane) look(lane, row[c + lane]);
    for (; c < columns; ++c) look(0, row[c * stride]);
  }
  uint8_t hidden = 0, seen = 0;
  for (int64_t lane = 0; lane < kKeyAlign; ++lane) {
    hidden |= least[lane] == 0;
    seen |= most[lane] != 0;
  }
  return (seen ? kSeen : 0) | (hidden ? kHidden : 0);
}

// One byte per cell. A cell is a piece of a query tile times kKeyAlign keys. If the mask is broadcast over an axis, that axis has one cell.
class MaskMap {
public:
  MaskMap(const Problem &p, const TileSizes &tile) : p_(p), tile_(tile) {
    if (!p.mask) return;
    const int64_t *stride = p.mask.stride;
    batch_ = stride[0] != 0 || (p.part && p.part.batch_q > 1) ? p.batch : 1; // cells differ between sequences if tiles do
    heads_ = stride[1] != 0 ? p.heads : 1;
    rows_ = stride[2] != 0 ? query_tiles(p, tile.q) * pieces_of(tile) : 1;
    keys_ = stride[3] != 0 ? kKeyAlign : max(1ll, (i64)columns());
    columns_ = div_up(columns(), keys_);
  }
  void take(Arena &arena) {
    cells_ = arena.take<uint8_t>(batch_ * heads_ * rows_ * columns_);
    totals_ = arena.take<uint8_t>(batch_ * heads_ * columns_);
  }

  void make(const Execution &execution) const {
    constexpr int64_t kWorthAThread = 1 << 16; // bytes of the mask
    const int64_t items = batch_ * heads_ * rows_, bytes_each = (p_.mask.stride[2] != 0 ? tile_.width : 1) * columns();
    fill(totals_, batch_ * heads_ * columns_, uint8_t(0));
    int64_t next = 0;
    execution.run(int32_t(min((i64)execution.threads, (i64)div_up(items * bytes_each, kWorthAThread))), [&](int32_t) {
      for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) make_row(item / rows_, item % rows_);
    });
  }

  explicit operator bool() const { return bool(p_.mask); }
  // The row of cells for the piece of queries from i0 on.
  const uint8_t *row(int64_t b, int64_t h, const QuerySpan &queries, int64_t i0) const {
    if (rows_ == 1) return cells_ + slice(b, h) * columns_;
    const int64_t start = queries.range.start, aligned = i0 / tile_.q * tile_.q, begin = max(aligned, start); // where the tile begins
    const int64_t tile = queries.first_tile + i0 / tile_.q - start / tile_.q;
    return cells_ + (slice(b, h) * rows_ + tile * pieces_of(tile_) + (i0 - begin) / tile_.width) * columns_;
  }
  // What the mask does to the cell of key j, for the query tile at i0: the union over the tile's pieces.
  uint8_t of_tile(int64_t b, int64_t h, const QuerySpan &queries, int64_t i0, int64_t j) const {
    const uint8_t *cell = row(b, h, queries, i0) + j / keys_;
    uint8_t kind = 0;
    for (int64_t n = 0; n < min((i64)pieces_of(tile_), (i64)rows_); ++n) kind |= cell[n * columns_];
    return kind;
  }
  // What the mask does to the cell of key j, for all queries.
  uint8_t of_all(int64_t b, int64_t h, int64_t j) const { return totals_[slice(b, h) * columns_ + j / keys_]; }

  // Functions of a row of cells. of(): the union of the cells of the keys [begin, end). seen(): the smallest range with all visible keys of
  // `keys`, in whole cells. cell_end(): the end of key j's cell.
  uint8_t of(const uint8_t *row, int64_t begin, int64_t end) const {
    uint8_t kind = 0;
    for (int64_t c = begin / keys_; c * keys_ < end; ++c) kind |= row[c];
    return kind;
  }
  Range seen(const uint8_t *row, Range keys) const {
    while (!keys.empty() && !(row[keys.begin / keys_] & kSeen)) keys.begin = cell_end(keys.begin);
    while (!keys.empty() && !(row[(keys.end - 1) / keys_] & kSeen)) keys.end = (keys.end - 1) / keys_ * keys_;
    return keys;
  }
  int64_t cell_end(int64_t j) const { return (j / keys_ + 1) * keys_; }

private:
  int64_t columns() const { return p_.part ? p_.size_k() : p_.longest_k(); } // how many columns of the mask count
  int64_t slice(int64_t b, int64_t h) const { return (batch_ > 1 ? b : 0) * heads_ + (heads_ > 1 ? h : 0); }
  void make_row(int64_t slice, int64_t row) const {
    const View &m = p_.mask;
    const int64_t pieces = pieces_of(tile_), piece = row % pieces * tile_.width;
    int64_t i0 = row / pieces * tile_.q + piece, most = p_.longest_q() - i0; // rows of the mask
    if (p_.part) {
      const QuerySpan tile = query_tile(p_, batch_ > 1 ? slice / heads_ : 0, row / pieces, tile_.q);
      i0 = tile.i0 + tile.range.local - tile.range.start + piece, most = tile.i1 - tile.i0 - piece;
    }
    const int64_t lanes = m.stride[2] == 0 ? 1 : min(min((i64)tile_.width, (i64)(tile_.q - piece)), (i64)most);
    for (int64_t c = 0; c < columns_; ++c) {
      const int64_t keys = m.stride[3] == 0 ? 1 : min((i64)keys_, (i64)(columns() - c * keys_));
      const uint8_t kind = classify(m.at<uint8_t>(slice / heads_, slice % heads_, i0, c * keys_), lanes, m.stride[2], keys, m.stride[3]);
      cells_[(slice * rows_ + row) * columns_ + c] = kind;
      __atomic_fetch_or(&totals_[slice * columns_ + c], kind, __ATOMIC_RELAXED);
    }
  }

  const Problem &p_;
  TileSizes tile_;
  int64_t batch_ = 0, heads_ = 0, rows_ = 0, columns_ = 0; // distinct slices of the mask; rows and columns of cells per slice
  int64_t keys_ = 0;                                       // keys per cell
  uint8_t *cells_ = nullptr, *totals_ = nullptr;
};

} // namespace strobe::inline STROBE_ISA
