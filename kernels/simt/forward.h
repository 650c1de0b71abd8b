// Forward, FlashAttention-2 (Dao 2023) with plain FMA: a CTA owns a tile of queries and walks the tiles of keys that they see.
#pragma once
#include "../attention/scores.h"
#include "tile.h"
#include "walk.h"

namespace strobe::simt {

template <Config C> struct Forward {
  using Arguments = ForwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using T = typename Multiply::T;
  static constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_k, kColumns = C.head_dim_v / C.threads_k;
  static constexpr int W = piece<T>(kColumns);

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    static_assert(sizeof(Walk) <= Config::kWalkBytes);
    const Inputs &in = a.in;

    const Item item = Item::of(blockIdx.x, a.splits, div_up(in.seqlen_q, C.tile_q), in.heads, in.batch, C.features.band);
    const i32 split = item.split, q0 = ((i32)div_up(in.seqlen_q, C.tile_q) - 1 - item.tile) * C.tile_q;
    const i32 h = item.head, b = item.batch, h_kv = h / in.group;
    const Sequence s = in.sequence(b);
    const i32 seqlen_q = (i32)s.band.seqlen_q, seqlen_k = (i32)s.band.seqlen_k;
    if (q0 >= seqlen_q) return;
    const i32 q1 = min(q0 + C.tile_q, seqlen_q);

    const Rows<E> Q(in.q, b, h, s.q0, seqlen_q, in.head_dim), K(in.k, b, h_kv, s.k0, seqlen_k, in.head_dim),
        V(in.v, b, h_kv, s.k0, seqlen_k, in.head_dim_v);
    Walk &walk = *reinterpret_cast<Walk *>(shared);
    T *P = reinterpret_cast<T *>(shared + Config::kWalkBytes);
    Multiply multiply(P + C.p_elements());
    const auto grid = multiply.grid;
    const Scores<C.features, T> scores(in, s, b);
    const Dropout<C.features> dropout(in);

    T O[kRows][kColumns] = {};
    T m[kRows], l[kRows]; // m: the same in all threads of a row; l: of this thread's keys
#pragma unroll
    for (int i = 0; i < kRows; ++i) m[i] = minus_infinity<T>(), l[i] = T(0);

    const Schedule schedule(s.band, q0, q1, C.tile_k, 16, C.features.blocks ? in.blocks.row(b, h, q0 / in.blocks.row_tokens) : BlockRow{});
    walk.run(schedule, split, a.splits, [&](const Tile &tile) {
      const i32 k0 = tile.begin, k1 = tile.end;
      const bool by_position = tile.masked || k1 - k0 < C.tile_k;

      // S = Q K^T
      T S[kRows][kKeys] = {};
      multiply.template nt<C.head_dim>(S, Q, q0, K, k0);

      score<kStaged>(scores, h, q0, k0, k1, by_position, S, P, grid);
      // P = exp(S - m), left in shared memory for the threads of the same row: those of one warp
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        T most = S[i][0];
#pragma unroll
        for (int j = 1; j < kKeys; ++j) most = maximum(most, S[i][j]);
        most = grid.reduce(most, [](T x, T y) { return maximum(x, y); });
        const T m_new = maximum(m[i], most);
        const T reference = m_new == minus_infinity<T>() ? T(0) : m_new; // nothing seen yet: exp2(-inf - 0) = 0
        const T alpha = exp2((m[i] - reference) * scores.unit);
        m[i] = m_new;
        l[i] *= alpha;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) O[i][j] *= alpha;
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          const T p = exp2((S[i][j] - reference) * scores.unit);
          l[i] += p;
          P[grid.row(i) * C.p_stride() + grid.column(j)] = p;
        }
      }
      if constexpr (C.features.dropout) {
#pragma unroll 1
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int j = 0; j < kKeys; ++j)
            if (!dropout.keep(b, h, q0 + grid.row(i), k0 + grid.column(j))) P[grid.row(i) * C.p_stride() + grid.column(j)] = T(0);
      }

      // O += P V. Its first barrier comes after all of P is written; that of the next product after all of P is read.
      multiply.template nn<C.head_dim_v>(O, P, V, k0, k1 - k0);
    });

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      T total = grid.reduce(l[i], [](T x, T y) { return x + y; });
      const i32 r = q0 + grid.row(i);
      if (r >= q1) continue;
      T scale = T(1), most = m[i] * natural<C.features, T>(in);
      if (a.splits == 1 && in.sinks) { // one more term of the denominator
        const T sink = *in.sinks.template at<const T>(0, h, 0, 0);
        const T larger = maximum(most, sink), reference = larger == minus_infinity<T>() ? T(0) : larger;
        scale = exp2((most - reference) * log2_e<T>());
        total = fma(total, scale, exp2((sink - reference) * log2_e<T>()));
        most = larger;
      }
      const bool empty = total == T(0);
      const T lse = empty ? minus_infinity<T>() : most + log2(total) * ln_2<T>();
      scale = empty ? T(0) : scale * dropout.factor() / total;
      store(a, b, h, s.q0 + r, split, O[i], scale, lse, grid);
    }
  }

private:
  // Scores that take more than a comparison are made element by element, by way of shared memory, in a loop that is not unrolled: it would
  // take the registers of O and seconds to compile.
  static constexpr bool kStaged = C.features.additive() || C.features.mask;

  template <bool kStage>
  static __device__ __forceinline__ void score(const Scores<C.features, T> &scores, i32 h, i32 q0, i32 k0, i32 k1, bool by_position,
                                               T (&S)[kRows][kKeys], T *P, const typename Multiply::Grid &grid) {
    const auto at = [&](int i, int j) -> T & { return P[grid.row(i) * C.p_stride() + grid.column(j)]; };
    if constexpr (kStage) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kKeys; ++j) at(i, j) = S[i][j];
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) {
        const auto row = scores.row(q0 + grid.row(i), h);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) at(i, j) = scores.score(at(i, j), row, k0 + grid.column(j), by_position, k1);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kKeys; ++j) S[i][j] = at(i, j);
    } else if (by_position) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto row = scores.row(q0 + grid.row(i), h);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) S[i][j] = scores.score(S[i][j], row, k0 + grid.column(j), true, k1);
      }
    }
  }

  static __device__ __forceinline__ void store(const Arguments &a, i64 b, i64 h, i64 row, i32 split, const T (&O)[kColumns], T scale, T lse,
                                               const typename Multiply::Grid &grid) {
    if (a.splits > 1) {
      const i64 index = split * a.in.rows() + a.in.row_index(b, h, row);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const i32 c = grid.template column<W>(j);
        if (c < a.in.head_dim_v) a.partial_out[index * a.in.head_dim_v + c] = (float)(O[j] * scale);
      }
      if (grid.x == 0) a.partial_lse[index] = (float)lse;
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const i32 c = grid.template column<W>(j);
        if (c < a.in.head_dim_v) *a.out.template at<E>(b, h, row, c) = Convert<E>::from(O[j] * scale);
      }
      if (grid.x == 0 && a.lse) *a.lse.template at<T>(b, h, row, 0) = lse;
    }
  }
};

} // namespace strobe::simt
