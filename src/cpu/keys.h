// K and V as the arithmetic needs them: in place where that is possible; packed once per head if several query tiles will read them;
// otherwise, and if they are paged, packed tile by tile. View::index says where row j of a sequence lies.
#pragma once
#include "key_ranges.h"
#include "quantised.h"

namespace strobe::inline STROBE_ISA {

// dense_rows(): a view of adjacent rows of numbers of type T. dense_copy(): copies to such rows; finite: numbers that are not finite become
// 0.
template <class T> View dense_rows(T *rows, int64_t d) {
  View view;
  view.data = reinterpret_cast<char *>(rows), view.dtype = sizeof(T) == 8 ? DType::f64 : DType::f32;
  view.stride[2] = round_to(d, 16), view.stride[3] = 1;
  return view;
}
template <class Rows, class T>
View dense_copy(const Rows &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, bool finite, T *copy) {
  const View view = dense_rows(copy, d);
  for (int64_t i = 0; i < n; ++i) {
    T *row = copy + i * view.stride[2];
    load_row(x, b, h, i0 + i, 0, d, row);
    for (int64_t c = 0; c < d && finite; ++c) row[c] = __builtin_isfinite(row[c]) ? row[c] : T(0);
  }
  return view;
}
template <class Math> class KeySource {
public:
  using T = typename Math::Real;
  using Element = typename Math::Element;

  // x: K, V or a tangent, with head dimension d. rows, columns: whether products use it as rows, as columns, or both. once: whether it may
  // be packed once for each head.
  KeySource(const Problem &p, const KeyRows &x, int64_t d, bool rows, bool columns, const TileSizes &tile, bool once = true)
      : p_(p), x_(x), d_(d), tile_k_(tile.k), rows_(rows), columns_(columns), in_place_(!x.quantised() && Math::in_place(x.x, d)),
        once_(once && (rows || columns) && !in_place_ && !x.quantised() && !x.x.page_size && p.group() * query_tiles(p, tile.q) > 1 &&
              p.blocks.block_k % kKeyAlign == 0 && aligned(p)) {}

  // How many elements the threads share: all ranges of all heads, packed.
  int64_t shared_size() const {
    return once_ ? (p_.total_k + kSlack * p_.batch * ranges()) * p_.heads_kv * Math::key_size(d_, rows_, columns_) : 0;
  }

  // The elements that each thread needs for itself.
  struct Scratch {
    Element *packed = nullptr;
    T *reals = nullptr, *buffer = nullptr, *numbers = nullptr;
  };
  Scratch take(Arena &arena) const {
    Scratch scratch;
    if (in_place_) return scratch;
    if (!once_) scratch.packed = arena.take<Element>((tile_k_ + kSlack) * Math::key_size(d_, rows_, columns_));
    scratch.reals = arena.take<T>(64 * round_to(d_, 32));
    scratch.buffer = arena.take<T>(16 * round_to(d_, 16));
    if (x_.quantised()) scratch.numbers = arena.take<T>((tile_k_ + kSlack) * round_to(d_, 16));
    return scratch;
  }

  // If keys are packed once: packs the keys [j0, j1) of a range of key head kv of sequence b. Keys count from the beginning of the range;
  // j0 is a multiple of kPacked.
  void pack(Element *shared, int64_t b, int64_t kv, int64_t n, int64_t j0, int64_t j1, const Scratch &scratch) const {
    if (!once_) return;
    const RowRange range = p_.range_k(b, n);
    auto keys = Math::keys_at(range_at(shared, b, kv, n), range.length, d_, rows_);
    pack_to({Math::rows_from(keys.rows, j0), Math::columns_from(keys.columns, j0)}, b, kv, p_.rows_k(b).begin + range.local + j0, j1 - j0,
            scratch);
  }
  bool once() const { return once_; }

  // The operands of a tile of keys; their first key is key `origin`.
  struct Tile {
    typename Math::Keys keys;
    int64_t origin;
  };
  Tile tile(Element *shared, int64_t b, int64_t kv, const KeysOfRange &keys, const Scratch &scratch) const {
    if (in_place_) return {Math::keys_in_place(x_.x, b, kv, keys.k0 + keys.begin), keys.begin};
    if (once_) {
      const RowRange range = p_.range_k(b, keys.range);
      return {Math::keys_at(range_at(shared, b, kv, keys.range), range.length, d_, rows_), range.start};
    }
    const int64_t n = keys.end - keys.begin;
    if (x_.quantised()) { // stored numbers may serve without conversion
      const View numbers = dense_rows(scratch.numbers, d_);
      if (Math::in_place(numbers, d_)) {
        dense_copy(x_, b, kv, keys.k0 + keys.begin, n, d_, false, scratch.numbers);
        return {Math::keys_in_place(numbers, 0, 0, 0), keys.begin};
      }
    }
    auto packed = Math::keys_at(scratch.packed, n, d_, rows_);
    pack_to(packed, b, kv, keys.k0 + keys.begin, n, scratch);
    return {packed, keys.begin};
  }

private:
  static constexpr int64_t kSlack = 64; // keys of padding per range (Math::keys_at)

  int64_t ranges() const { return p_.part ? p_.part.count_k : 1; }
  // Whether key tiles begin at multiples of kKeyAlign from the beginning of their range. In a part, mask blocks and the cells of a mask may
  // be cut elsewhere.
  static bool aligned(const Problem &p) {
    if (!p.part || !(p.mask || p.blocks.present)) return true;
    for (int64_t n = 0; n < p.part.batch_k * p.part.count_k; ++n)
      if (p.part.k[n].start % kKeyAlign != 0) return false;
    return true;
  }
  Element *range_at(Element *shared, int64_t b, int64_t kv, int64_t n) const {
    auto k = p_.rows_k(b);
    int64_t start = (p_.packed_k() ? k.begin : b * p_.seqlen_k) + kSlack * b * ranges();
    int64_t keys = start * p_.heads_kv + kv * (k.length + kSlack * ranges()) + p_.range_k(b, n).local + kSlack * n;
    return shared + keys * Math::key_size(d_, rows_, columns_);
  }
  void pack_to(typename Math::Keys to, int64_t b, int64_t kv, int64_t j0, int64_t n, const Scratch &scratch) const {
    if (x_.quantised())
      Math::pack_keys(dense_copy(x_, b, kv, j0, n, d_, false, scratch.numbers), 0, 0, 0, n, d_, to, rows_, columns_, scratch.reals,
                      scratch.buffer);
    else
      Math::pack_keys(x_.x, b, kv, j0, n, d_, to, rows_, columns_, scratch.reals, scratch.buffer);
  }

  const Problem &p_;
  KeyRows x_;
  int64_t d_, tile_k_;
  bool rows_, columns_, in_place_, once_;
};

// Rows of K, V, Q or dO with 0 in place of each number that is not finite, for products with weights that may be 0, because 0 times an
// infinity is NaN. add_nonfinite adds the numbers that are not finite to the sums of the queries that see them.
template <class Rows, class T> View finite_rows(const Rows &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, T *copy) {
  return dense_copy(x, b, h, i0, n, d, true, copy);
}

// The left operand of a product over keys, from a tile of K or V with 0 in place of numbers that are not finite.
template <class Math> struct FiniteKeys {
  using T = typename Math::Real;
  T *copy, *reals = nullptr, *buffer = nullptr;
  typename Math::Element *packed = nullptr;

  FiniteKeys(Arena &arena, int64_t tile_k, int64_t d) : copy(arena.take<T>((tile_k + 64) * round_to(d, 16))) {
    if (Math::in_place(dense_rows(copy, d), d)) return;
    reals = arena.take<T>(64 * round_to(d, 32));
    buffer = arena.take<T>(16 * round_to(d, 16));
    packed = arena.take<typename Math::Element>((tile_k + 64) * Math::key_size(d, false, true));
  }

  // The operand for n keys from j0 on, with d columns.
  typename Math::Left columns(const KeyRows &x, int64_t b, int64_t kv, int64_t j0, int64_t n, int64_t d) const {
    const View finite = finite_rows(x, b, kv, j0, n, d, copy);
    if (Math::in_place(finite, d)) return Math::keys_in_place(finite, 0, 0, 0).columns;
    const auto keys = Math::keys_at(packed, n, d, false);
    Math::pack_keys(finite, 0, 0, 0, n, d, keys, false, true, reals, buffer);
    return keys.columns;
  }
};

// K and V for one direction, the packed elements that threads share, and the map of the mask.
template <class Math> struct KeyPair {
  using T = typename Math::Real;
  using Element = typename Math::Element;
  KeySource<Math> k, v;
  MaskMap mask;
  Element *shared_k = nullptr, *shared_v = nullptr;
  uint8_t *used = nullptr; // for each kPacked keys of each key head: whether some query sees a key of these

  static constexpr int64_t kPacked = 64;
  static int64_t groups(const Problem &p) { return div_up(p.longest_k(), kPacked) + (p.part ? p.part.count_k : 0); }
  // The number of the first group of keys of range n.
  static int64_t first_group(const RowRange &range, int64_t n) { return range.local / kPacked + n; }
  void take(Arena &arena, const Problem &p) {
    mask.take(arena);
    shared_k = arena.take<Element>(k.shared_size());
    shared_v = arena.take<Element>(v.shared_size());
    used = arena.take<uint8_t>(p.batch * p.heads_kv * groups(p));
  }
  // Reads the mask, and packs the keys that are packed once, one head per item.
  void prepare(const Problem &p, const Execution &execution, char *scratch, int64_t each) const {
    if (mask) mask.make(execution);
    const int64_t heads = p.batch * p.heads_kv;
    if (!k.once() && !v.once()) return;
    int64_t next = 0; // uses builtins, not std::atomic, because isa.h forbids inline functions of std
    execution.run(int32_t(min((i64)execution.threads, (i64)heads)), [&](int32_t thread) {
      Arena arena(scratch + thread * each);
      auto scratch_k = k.take(arena), scratch_v = v.take(arena);
      for (int64_t head; (head = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < heads;) {
        const int64_t b = head / p.heads_kv, kv = head % p.heads_kv;
        uint8_t *groups_used = used + head * groups(p);
        mark_used(p, b, kv, groups_used);
        for (int64_t n = 0; n < (p.part ? p.part.count_k : 1); ++n) {
          const RowRange range = p.range_k(b, n);
          const uint8_t *group = groups_used + first_group(range, n);
          for (int64_t j0 = 0, j1; j0 < range.length; j0 = j1) {
            const bool wanted = group[j0 / kPacked];
            for (j1 = j0 + kPacked; j1 < range.length && bool(group[j1 / kPacked]) == wanted;) j1 += kPacked;
            j1 = min(j1, range.length);
            if (!wanted) continue;
            k.pack(shared_k, b, kv, n, j0, j1, scratch_k);
            v.pack(shared_v, b, kv, n, j0, j1, scratch_v);
          }
        }
      }
    });
  }

private:
  void mark_used(const Problem &p, int64_t b, int64_t kv, uint8_t *groups_used) const {
    fill(groups_used, groups(p), uint8_t(0));
    for (int64_t h = kv * p.group(); h < (kv + 1) * p.group(); ++h) {
      for (int64_t n = 0; n < ranges_of_queries(p); ++n) {
        const RowRange queries = p.range_q(b, n);
        const Head<T> head(p, b, h, {queries, 0, queries.start, queries.end()});
        // The queries lie within one row of mask blocks.
        const int64_t rows = p.blocks.present ? p.blocks.block_q : max(queries.end(), int64_t(1));
        for (int64_t i0 = queries.start; i0 < queries.end(); i0 = (i0 / rows + 1) * rows) {
          const int64_t i1 = min((i0 / rows + 1) * rows, queries.end());
          RangeTiles<T> tiles(head, i0, i1, max((i64)p.longest_k(), (i64)1));
          for (KeysOfRange keys; tiles.next(keys);) {
            const RowRange range = head.range_k(keys.range);
            uint8_t *group = groups_used + first_group(range, keys.range);
            for (int64_t j = range.start + round_down(keys.begin - range.start, kKeyAlign); j < keys.end; j += kKeyAlign)
              group[(j - range.start) / kPacked] |= !mask || mask.of_all(b, h, j) & kSeen;
          }
        }
      }
    }
  }
};

} // namespace strobe::inline STROBE_ISA
