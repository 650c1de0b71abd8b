// The keys of a query tile, and the keys of each of its pieces.
#pragma once
#include "keys.h"

namespace strobe::inline STROBE_ISA {

// The schedule's key tiles, cut where a mask hides a cell from every query of the tile. Invariant: tiles are also cut at multiples of
// tile.k, counted over all keys, wherever the first visible key lies.
template <class T> class KeyTiles {
public:
  KeyTiles(const Head<T> &head, const MaskMap &mask, const TileSizes &tile, int64_t i0, int64_t i1)
      : head_(head), mask_(mask), i0_(i0), tile_k_(tile.k),
        tiles_(head, i0, i1, head.p->invariant ? max(head.band.seqlen_k, (i64)1) : tile.k) {}

  bool next(KeysOfRange &keys) {
    if (!mask_ || head_.cut()) return next_scheduled(keys);
    for (;;) {
      while (rest_.begin < rest_.end && !seen(rest_.begin)) rest_.begin = mask_.cell_end(rest_.begin);
      if (rest_.begin < rest_.end) break;
      if (!next_scheduled(rest_)) return false;
    }
    keys = rest_;
    keys.end = mask_.cell_end(keys.begin);
    while (keys.end < rest_.end && seen(keys.end)) keys.end = mask_.cell_end(keys.end);
    keys.end = min(keys.end, rest_.end);
    rest_.begin = keys.end;
    return true;
  }

private:
  bool seen(int64_t j) const { return mask_.of_tile(head_.b, head_.h, head_.queries, i0_, j) & kSeen; }
  bool next_scheduled(KeysOfRange &keys) {
    if (!head_.p->invariant) return tiles_.next(keys);
    if (run_.begin >= run_.end && !tiles_.next(run_)) return false; // run_ has all adjacent keys
    keys = run_;
    // A block of the mask may begin within a sum of kKeyAlign keys.
    const int64_t unit = keys.begin % kKeyAlign == 0 ? tile_k_ : kKeyAlign;
    keys.end = min((i64)keys.end, round_down(keys.begin, unit) + unit);
    run_.begin = keys.end;
    return true;
  }

  const Head<T> &head_;
  const MaskMap &mask_;
  int64_t i0_, tile_k_;
  RangeTiles<T> tiles_;
  KeysOfRange rest_{{0, 0, false, false}, 0, 0}, run_{{0, 0, false, false}, 0, 0};
};

// A piece of lanes in a key tile. The tile is cut to the keys that the piece sees.
template <class T> struct Piece {
  TileSpan span;
  int64_t k0; // key j is row k0 + j of K and V
  bool band_masked, use_mask;
  bool hides;            // the caller's functions may hide keys of the piece
  bool infinite = false; // Q or K has a number that is not finite
  const MaskMap *mask;
  const uint8_t *cells; // a row of the mask's map; null if there is no map
  // Whether some score may be -inf.
  bool masked(const Head<T> &head) const { return band_masked || use_mask || head.p->bias || hides || infinite; }
  // Products over keys run in steps of kKeyAlign, and may read keys past the piece, with a P of 0.
  int64_t keys_read(const Head<T> &head) const { return min((i64)round_to(span.keys, kKeyAlign), (i64)(head.k_end - k0 - span.j0)); }
  bool reads_hidden(const Head<T> &head) const { return masked(head) || keys_read(head) > span.keys; }
  bool uses_mask(int64_t j0, int64_t keys) const { return *mask && (!cells || mask->of(cells, j0, j0 + keys) & kHidden); }
};
template <class T>
STROBE_INLINE bool make_piece(const Head<T> &head, const MaskMap &mask, int64_t i0, int64_t lanes, int64_t width, const KeysOfRange &tile,
                              Piece<T> &piece) {
  Range any = intersect({tile.begin, tile.end}, head.band.keys_any(i0, i0 + lanes)), all = head.band.keys_all(i0, i0 + lanes);
  piece.mask = &mask;
  piece.cells = mask && !head.cut() ? mask.row(head.b, head.h, head.queries, i0) : nullptr;
  piece.k0 = tile.k0;
  if (piece.cells) any = mask.seen(piece.cells, any);
  if (any.empty()) return false;
  int64_t begin = tile.begin + round_down(any.begin - tile.begin, kKeyAlign);
  piece.span = {i0, lanes, width, begin, any.end - begin};
  piece.band_masked = begin < all.begin || any.end > all.end;
  piece.use_mask = piece.uses_mask(begin, piece.span.keys);
  piece.hides = head.hides && tile.open;
  return true;
}

// Turns q.k of a chunk of a piece into scores.
template <class T>
STROBE_INLINE void apply_options(const Head<T> &head, const Piece<T> &piece, const TileSpan &chunk, ScoreScratch<T> &scratch, T *s,
                                 T *slopes) {
  const bool use_mask = piece.use_mask && piece.uses_mask(chunk.j0, chunk.keys);
  if (head.additive || piece.hides || piece.band_masked || use_mask)
    apply_options(head, chunk, piece.band_masked, use_mask, piece.hides, scratch, s, slopes);
}

} // namespace strobe::inline STROBE_ISA
