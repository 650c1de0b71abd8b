// One tile of P and dS, recomputed from Q, K, dO, V, LSE and D: what every gradient starts from.
#pragma once
#include "../attention/scores.h"
#include "tile.h"

namespace strobe::simt {

// LSE and D of a tile's queries, in shared memory; rows at `end` and beyond are hidden.
template <Config C, class T> struct RowStatistics {
  T *lse, *delta;

  __device__ explicit RowStatistics(T *shared) : lse(shared), delta(shared + C.tile_q) {}

  __device__ __forceinline__ void load(const BackwardArguments &a, i64 b, i64 h, const Sequence &s, i32 q0, i32 end) const {
    for (i32 i = (i32)threadIdx.x; i < C.tile_q; i += C.threads()) {
      T x = -minus_infinity<T>(), y = T(0);
      if (q0 + i < end) {
        x = *a.lse.at<const T>(b, h, s.q0 + q0 + i, 0);
        y = static_cast<const T *>(a.delta)[a.in.row_index(b, h, s.q0 + q0 + i)];
      }
      lse[i] = x == minus_infinity<T>() ? -x : x; // a row that sees nothing
      delta[i] = y;
    }
  }
};

// S = Q K^T, dP = dO V^T -> in shared memory, in their place, P (kept elements, without dropout's factor) and dS; dx: write not dS but d loss /
// d (scale * q.k), which a softcap tells apart. Each thread writes what it then reads, element by element: registers are for products.
template <Config C, bool kThroughScore, class Multiply, class T, class E>
__device__ __forceinline__ void recompute(Multiply &multiply, const Scores<C.features, T> &scores, const Dropout<C.features> &dropout,
                                          const RowStatistics<C, T> &rows, T *P, T *dS, const Rows<E> &Q, const Rows<E> &K,
                                          const Rows<E> &dO, const Rows<E> &V, i32 h, i32 q0, i32 q1, i32 k0, i32 k1, bool masked) {
  constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_k;
  const auto grid = multiply.grid;
  const auto leave = [&](T *where, const T(&x)[kRows][kKeys]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kKeys; ++j) where[grid.row(i) * C.p_stride() + grid.column(j)] = x[i][j];
  };
  {
    T S[kRows][kKeys] = {};
    multiply.template nt<C.head_dim>(S, Q, q0, K, k0);
    leave(P, S);
  }
  {
    T dP[kRows][kKeys] = {};
    multiply.template nt<C.head_dim_v>(dP, dO, q0, V, k0);
    leave(dS, dP);
  }

  const bool by_position = masked || q1 - q0 < C.tile_q || k1 - k0 < C.tile_k;
  const T scale = natural<C.features, T>(scores.in), factor = T(dropout.factor());
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    const i32 r = grid.row(i);
    auto row = scores.row(q0 + r, h);
    if (q0 + r >= q1) row.end = 0;
    const T lse = rows.lse[r], D = rows.delta[r];
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const i32 key = k0 + grid.column(j);
      T &p = P[r * C.p_stride() + grid.column(j)], &ds = dS[r * C.p_stride() + grid.column(j)], slope;
      const T s = scores.score(p, row, key, by_position, k1, slope);
      const bool hidden = s == minus_infinity<T>(), kept = dropout.keep(scores.b, h, q0 + r, key);
      const T x = hidden ? T(0) : exp2(fma(s, scale, -lse) * log2_e<T>());
      if constexpr (C.features.dropout) ds = kept ? ds * factor : T(0);
      ds = hidden ? T(0) : x * (ds - D) * (kThroughScore ? slope : T(1));
      p = kept ? x : T(0);
    }
  }
}

} // namespace strobe::simt
