// P and dS of one tile, computed again from Q, K, dO, V, LSE and D. Every gradient starts from them.
#pragma once
#include "part.h"

namespace strobe::simt {

// LSE and D of a tile's queries, in shared memory; rows from `end` on are hidden. correction: LSE's correction, in exp2's unit.
template <Config C, class T> struct RowStatistics {
  T *lse, *correction, *delta;

  __device__ explicit RowStatistics(T *shared) : lse(shared), correction(shared + C.tile_q), delta(shared + 2 * C.tile_q) {}

  __device__ __forceinline__ void load(const BackwardArguments &a, i64 b, i64 h, const Sequence &s, i32 q0, i32 end) const {
    for (i32 i = (i32)threadIdx.x; i < C.tile_q; i += C.threads()) {
      T x = -minus_infinity<T>(), y = T(0), z = T(0);
      if (q0 + i < end) {
        const i64 index = a.in.row_index(b, h, s.q0 + q0 + i);
        x = *a.lse.at<const T>(b, h, s.q0 + q0 + i, 0);
        y = static_cast<const T *>(a.delta)[index];
        z = static_cast<const T *>(a.delta)[a.in.rows() + index];
      }
      lse[i] = x == minus_infinity<T>() ? -x : x; // +inf for a row that sees no key, so that P is 0
      delta[i] = y;
      correction[i] = z * kLog2e<T>;
    }
  }
};

// Computes S = Q K^T and dP = dO V^T in the shared memory of P and dS. Then calls write(P's place, dS's place, P, kept, dS, d score / d
// (scale * q.k)) for each element. P is without dropout, dS is with it. Rows before the beginning of Q and K are hidden. Each thread reads
// only what it has written, element by element, because the products need the registers.
template <Config C, class Multiply, class T, class Source, class F>
__device__ __forceinline__ void recompute(Multiply &multiply, const Scores<C.features, T> &scores, const Dropout<C.features> &dropout,
                                          const Kept<C> &kept_of, const RowStatistics<C, T> &rows, T *P, T *dS, const Source &Q,
                                          const Source &K, const Source &dO, const Source &V, i32 h, i32 q0, i32 q1, i32 k0, i32 k1,
                                          bool masked, bool open, F &&write) {
  constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_k;
  const auto grid = multiply.grid;
  constexpr int WM = piece<T>(kRows), WN = piece<T>(kKeys);
  const auto leave = [&](T *where, T(&x)[kRows][kKeys], bool first) { // not first: adds to the numbers there
    auto grid = multiply.grid;
    grid.x = computed_here(grid.x), grid.y = computed_here(grid.y);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kKeys; j += WN) {
        auto &place = *reinterpret_cast<Pack<T, WN> *>(where + grid.template row<WM>(i) * C.p_stride() + grid.template column<WN>(j));
        Pack<T, WN> y{};
        if (!first) y = place;
#pragma unroll
        for (int w = 0; w < WN; ++w) y.x[w] += x[i][j + w], x[i][j + w] = T(0);
        place = y;
      }
  };
  kept_of.draw(dropout, scores.b, h, q0, k0);
  T sum[kRows][kKeys] = {};
  multiply.template nt_in_runs<C.head_dim, C.score_run()>(sum, Q, q0, K, k0, [&](bool first) { leave(P, sum, first); });
  leave(P, sum, C.head_dim == C.score_run());
  multiply.template nt_in_runs<C.head_dim_v, kRunOfColumns>(sum, dO, q0, V, k0, [&](bool first) { leave(dS, sum, first); });
  leave(dS, sum, C.head_dim_v == kRunOfColumns);

  const bool by_position = masked || q1 - q0 < C.tile_q || k1 - k0 < C.tile_k;
  const T scale = natural_factor<C.features>(T(scores.in.scale)), factor = Kept<C>::template factor<T>(dropout);
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    const i32 r = grid.template row<WM>(i);
    auto row = scores.row(q0 + r, h);
    if (q0 + r >= q1) row.end = 0;
    const T lse = rows.lse[r], correction = rows.correction[r], D = rows.delta[r];
#pragma unroll
    for (int j = 0; j < kKeys; j += WN) {
      const i32 c = grid.template column<WN>(j);
      auto &p_place = *reinterpret_cast<Pack<T, WN> *>(P + r * C.p_stride() + c);
      auto &ds_place = *reinterpret_cast<Pack<T, WN> *>(dS + r * C.p_stride() + c);
      Pack<T, WN> p = p_place, ds = ds_place;
#pragma unroll
      for (int w = 0; w < WN; ++w) {
        T slope;
        const T s = score_of<C>(scores, p.x[w], row, k0 + c + w, by_position, k1, open, slope);
        bool hidden = s == minus_infinity<T>();
        if constexpr (Source::may_lack()) hidden = hidden || q0 + r < Q.from() || q0 + r >= q1 || k0 + c + w < K.from();
        const bool kept = kept_of(r, c + w);
        const T x = hidden ? T(0) : probability(s, scale, lse, correction);
        T dp = ds.x[w];
        if constexpr (C.features.dropout) dp = kept ? dp * factor : T(0);
        write(p.x[w], ds.x[w], x, kept, hidden ? T(0) : x * (dp - D), slope);
      }
      p_place = p, ds_place = ds;
    }
  }
}

} // namespace strobe::simt
