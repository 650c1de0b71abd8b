// A thread block recomputes dS of one tile of scores with plain FMA, for the passes that add it up: dbias and the gradients of captured
// tensors.
#pragma once
#include "gradient.h"

namespace strobe::simt {

template <Config C> struct TileGradient {
  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using Source = typename Multiply::Source;
  using T = typename Multiply::T;
  static constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_k;
  static constexpr i32 kPlace = max(C.p_elements(), C.pt_elements());
  static_assert(!C.features.part || C.features.part == kAnywhere);
  static __device__ constexpr bool of_part() { return C.features.part != 0; }

  const BackwardArguments &a;
  const Inputs &in;
  T *const P, *const dS; // of the tile: q.k and dS
  const RowStatistics<C, T> rows;
  Multiply multiply;
  const Dropout<C.features> dropout;
  const Kept<C> kept;
  i32 b, h, q0, q1; // the queries of the last call of take_queries()
  Range any, all;   // keys that some of these queries see; keys that all of them see
  i32 seqlen_k;

  __device__ __forceinline__ TileGradient(const BackwardArguments &a, unsigned char *shared)
      : a(a), in(a.in), P(reinterpret_cast<T *>(shared)), dS(P + kPlace), rows(dS + kPlace), multiply(dS + kPlace + 3 * C.tile_q),
        dropout(a.in), kept(dS + kPlace + 3 * C.tile_q + 2 * C.stage_elements()) {}

  // Moves to a tile of queries; returns whether there are any. In a part `first` counts the held rows.
  __device__ __forceinline__ bool take_queries(i32 batch, i32 head, i32 first) {
    b = batch, h = head, q0 = first;
    if constexpr (of_part()) {
      const HeldRows held = in.held(b);
      if (q0 >= held.seqlen_q) return false;
      q1 = min(q0 + C.tile_q, (i32)held.seqlen_q);
      __syncthreads(); // LSE and D of the previous tile have been read
      rows.load(a, b, h, {held.q0, held.k0, {}}, q0, q1);
      return true;
    }
    const Sequence s = in.sequence<C.features>(b);
    if (q0 >= s.band.seqlen_q) return false;
    q1 = min(q0 + C.tile_q, (i32)s.band.seqlen_q), seqlen_k = (i32)s.band.seqlen_k;
    any = s.band.keys_any(q0, q1), all = s.band.keys_all(q0, q1);
    __syncthreads(); // LSE and D of the previous tile have been read
    rows.load(a, b, h, s, q0, q1);
    return true;
  }
  // Computes dS of these queries and of the keys from k0 on (in a part positions of the whole sequence). Calls use(scores, first): the
  // tile's row i is the query at position first + i. In a part it may call several times, each time with other pairs of the tile; dS of the
  // others is 0. It does not call if no query sees a key. A thread may read the elements at place() at once.
  template <class Use> __device__ __forceinline__ void compute(i32 k0, const Use &use) {
    if constexpr (of_part()) {
      compute_part(k0, use);
      return;
    }
    const i32 k1 = min(k0 + C.tile_k, seqlen_k);
    if (k0 >= seqlen_k || k1 <= any.begin || k0 >= any.end || !block_kept(k0)) return;
    const Sequence s = in.sequence<C.features>(b);
    const i32 h_kv = h / in.group, seqlen_q = (i32)s.band.seqlen_q;
    const Source Q(in.q, b, h, s.q0, seqlen_q, in.head_dim), K(k_of<E>(in, s, b, h_kv), seqlen_k),
        dO(a.dout, b, h, s.q0, seqlen_q, in.head_dim_v), V(v_of<E>(in, s, b, h_kv), seqlen_k);
    const Scores<C.features, T> scores(in, s, b);
    if constexpr (C.features.dropout) __syncthreads(); // every thread has read the previous tile's dropout
    recompute<C>(multiply, scores, dropout, kept, rows, P, dS, Q, K, dO, V, h, q0, q1, k0, k1, k0 < all.begin || k1 > all.end, true,
                 [](T &, T &ds, T, bool, T gradient, T) { ds = gradient; });
    use(scores, q0);
  }
  // Where the thread's element (i, j) lies, in the layout of recompute().
  __device__ __forceinline__ i32 place(int i, int j) const {
    return multiply.grid.template row<piece<T>(kRows)>(i) * C.p_stride() + multiply.grid.template column<piece<T>(kKeys)>(j);
  }

private:
  // Rows of the tile are held rows, its columns are positions of keys. Takes the intersection of each range of queries with each range of
  // keys.
  template <class Use> __device__ __forceinline__ void compute_part(i32 k0, const Use &use) {
    const HeldRanges queries = held_queries(in, b), keys = held_keys(in, b);
#pragma unroll 1
    for (i32 n = 0; n < queries.count; ++n) {
      const HeldRange r = queries.at(n);
      if (r.local + r.length <= q0) continue;
      if (r.local >= q1) break;
      const i32 first = q0 - r.shift(), end = min(r.end(), first + C.tile_q); // the tile's first row as a position
#pragma unroll 1
      for (i32 i0 = max(r.start, first), i1; i0 < end; i0 = i1) {
        i1 = C.features.blocks ? min(end, (i0 / C.tile_q + 1) * C.tile_q) : end; // within one row of mask blocks
#pragma unroll 1
        for (i32 m = keys.first_behind(k0); m < keys.count && keys.at(m).start < k0 + C.tile_k; ++m)
          compute_ranges(first, i0, i1, r.shift(), k0, keys.at(m), use);
      }
    }
  }
  // Takes the queries [i0, i1), in a tile that begins at query `first`, and a range's keys in the tile from k0 on.
  template <class Use>
  __device__ __forceinline__ void compute_ranges(i32 first, i32 i0, i32 i1, i32 shift, i32 k0, const HeldRange &range, const Use &use) {
    const i32 j0 = max(k0, range.start), j1 = min(k0 + C.tile_k, range.end());
    Sequence s = whole_sequence(in, b);
    const Range seen = s.band.keys_any(i0, i1);
    if (j0 >= j1 || j1 <= seen.begin || j0 >= seen.end) return;
    if constexpr (C.features.blocks)
      if (!in.blocks.row(b, h, i0 / in.blocks.row_tokens).keeps(k0)) return;
    s.q0 += shift, s.band.seqlen_q = i1, s.k0 += range.shift(), s.band.seqlen_k = j1;
    const i32 h_kv = h / in.group;
    Source Q(in.q, b, h, s.q0, i1, in.head_dim), K(k_of<E>(in, s, b, h_kv), j1), dO(a.dout, b, h, s.q0, i1, in.head_dim_v),
        V(v_of<E>(in, s, b, h_kv), j1);
    Q.first = dO.first = i0, K.first = V.first = j0;
    const Scores<C.features, T> scores = scores_of<C, T>(in, s, b);
    __syncthreads(); // the previous tile has been read
    recompute<C>(multiply, scores, dropout, kept, rows, P, dS, Q, K, dO, V, h, first, i1, k0, j1, true, true,
                 [](T &, T &ds, T, bool, T gradient, T) { ds = gradient; });
    use(scores, first);
  }
  __device__ __forceinline__ bool block_kept(i32 k0) const {
    if constexpr (!C.features.blocks) return true;
    return in.blocks.row(b, h, q0 / in.blocks.row_tokens).keeps(k0);
  }
};

} // namespace strobe::simt
