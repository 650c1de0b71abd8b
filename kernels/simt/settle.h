// Settles rows whose LSE is large (device/settle_row.h), with plain FMA.
#pragma once
#include "../device/settle_row.h"
#include "gradient.h"
#include "walk.h"

namespace strobe::simt {

template <Config C> struct Settle {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ void run(const Arguments &a) { settle_rows<QueryTile>(a); }

private:
  using Multiply = Products<C>;
  using E = typename Multiply::E;

  struct QueryTile {
    using T = typename Multiply::T;
    static constexpr i32 kDType = C.dtype, kThreads = C.threads(), kTileQ = C.tile_q;
    static constexpr i32 kOwn = C.invariant;
    static __device__ constexpr Features features() { return C.features; }
    const BackwardArguments &a;
    unsigned char *const shared;

    __device__ __forceinline__ RowSums<T> row_sums(i32 b, i32 h, const Sequence &s, i32 q0) const {
      const Inputs &in = a.in;
      constexpr i32 kPlace = max(C.p_elements(), C.pt_elements());
      static_assert(sizeof(Walk<TilesOfKeys<C>>) <= C.walk_bytes());
      auto &walk = *reinterpret_cast<Walk<TilesOfKeys<C>> *>(shared);
      T *P = reinterpret_cast<T *>(shared + C.walk_bytes()), *dS = P + kPlace;
      const RowStatistics<C, T> rows(dS + kPlace);
      Multiply multiply(dS + kPlace + 3 * C.tile_q);
      const Dropout<C.features> dropout(in);
      const Kept<C> kept(dS + kPlace + 3 * C.tile_q + 2 * C.stage_elements());

      const i32 h_kv = h / in.group, t = (i32)threadIdx.x, seqlen_q = (i32)s.band.seqlen_q, seqlen_k = (i32)s.band.seqlen_k;
      const i32 q1 = min(q0 + C.tile_q, seqlen_q);
      rows.load(a, b, h, s, q0, q1);
      const typename Multiply::Source Q(in.q, b, h, s.q0, seqlen_q, in.head_dim), all_K(k_of<E>(in, s, b, h_kv), seqlen_k),
          dO(a.dout, b, h, s.q0, seqlen_q, in.head_dim_v), all_V(v_of<E>(in, s, b, h_kv), seqlen_k);
      const Scores<C.features, T> scores = scores_of<C, T>(in, s, b);
      RowSums<T> sums = {T(0), T(0)}, lost = {T(0), T(0)};
      const auto step = [&](const typename TilesOfKeys<C>::Tile &tile, const bool &) {
        decltype(auto) K = rows_of(all_K, tile);
        decltype(auto) V = rows_of(all_V, tile);
        recompute<C>(multiply, scores, dropout, kept, rows, P, dS, Q, K, dO, V, h, q0, q1, tile.begin, tile.end, tile.masked, tile.open,
                     [](T &p, T &ds, T x, bool, T gradient, T) { p = x, ds = gradient; });
        __syncthreads();
        if (t < q1 - q0)
          for (i32 c = 0; c < C.tile_k; ++c) {
            if (C.invariant && P[t * C.p_stride() + c] == T(0)) continue; // so that bits do not depend on the number of hidden keys
            add(sums.P, lost.P, P[t * C.p_stride() + c]);
            add(sums.dS, lost.dS, dS[t * C.p_stride() + c]);
          }
        __syncthreads();
      };
      if constexpr (C.features.part)
        walk.run({part_keys<C>(in, s, b, h, q0, q1)}, 0, 1, step);
      else
        walk.run({Schedule(s.band, q0, q1, C.tile_k, 16,
                           C.features.blocks ? in.template block_row<C.features>(b, h, q0 / in.blocks.row_tokens) : BlockRow{})},
                 0, 1, step);
      return sums;
    }
  };
};

} // namespace strobe::simt
