// Rows whose LSE is large (settle_row.h), with plain FMA.
#pragma once
#include "../device/settle_row.h"
#include "gradient.h"
#include "walk.h"

namespace strobe::simt {

// A CTA takes a tile of queries, and leaves at once where no LSE is large. After Delta.
template <Config C> struct Settle {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using T = typename Multiply::T;
  static_assert(C.tile_q <= kThreads);

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    constexpr i32 kPlace = max(C.p_elements(), C.pt_elements());
    auto &walk = *reinterpret_cast<Walk<KeyTiles> *>(shared);
    T *P = reinterpret_cast<T *>(shared + Config::kWalkBytes), *dS = P + kPlace;
    const RowStatistics<C, T> rows(dS + kPlace);
    Multiply multiply(dS + kPlace + 3 * C.tile_q);
    const Dropout<C.features> dropout(in);
    const Kept<C> kept(dS + kPlace + 3 * C.tile_q + 2 * C.stage_elements());

    const Item item = Item::of(blockIdx.x, 1, div_up(in.seqlen_q, C.tile_q), in.heads, in.batch, false);
    const i32 q0 = item.tile * C.tile_q, h = item.head, b = item.batch, h_kv = h / in.group, t = (i32)threadIdx.x;
    const Sequence s = in.sequence(b);
    const i32 seqlen_q = (i32)s.band.seqlen_q, seqlen_k = (i32)s.band.seqlen_k;
    if (q0 >= seqlen_q) return;
    const i32 q1 = min(q0 + C.tile_q, seqlen_q);
    const bool mine = t < q1 - q0;
    rows.load(a, b, h, s, q0, q1);
    __syncthreads();
    if (!__syncthreads_or(mine && large_lse<C.dtype>(rows.lse[t]))) return;

    const Rows<E> Q(in.q, b, h, s.q0, seqlen_q, in.head_dim), K(in.k, b, h_kv, s.k0, seqlen_k, in.head_dim),
        dO(a.dout, b, h, s.q0, seqlen_q, in.head_dim_v), V(in.v, b, h_kv, s.k0, seqlen_k, in.head_dim_v);
    const Scores<C.features, T> scores(in, s, b);
    T sum = T(0), rest = T(0), sum_lost = T(0), rest_lost = T(0);
    const Schedule schedule(s.band, q0, q1, C.tile_k, 16, C.features.blocks ? in.blocks.row(b, h, q0 / in.blocks.row_tokens) : BlockRow{});
    walk.run({schedule}, 0, 1, [&](const Tile &tile, const bool &) {
      recompute<C>(multiply, scores, dropout, kept, rows, P, dS, Q, K, dO, V, h, q0, q1, tile.begin, tile.end, tile.masked,
                   [](T &p, T &ds, T x, bool, T gradient, T) { p = x, ds = gradient; });
      __syncthreads();
      if (mine)
        for (i32 c = 0; c < C.tile_k; ++c) {
          add(sum, sum_lost, P[t * C.p_stride() + c]);
          add(rest, rest_lost, dS[t * C.p_stride() + c]);
        }
      __syncthreads();
    });
    if (mine) settle_row(a, b, h, s.q0 + q0 + t, rows.lse[t], sum, rest);
  }
};

} // namespace strobe::simt
