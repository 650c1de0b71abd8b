// Forward, FlashAttention-2 (Dao 2023) with plain FMA: a CTA owns a tile of queries and walks the tiles of keys that they see.
#pragma once
#include "../ptx/math.h" // first: softmax.h finds exp2 and select there

#include "../attention/softmax.h"
#include "../device/tile_order.h"
#include "part.h"

namespace strobe::simt {

template <Config C> struct Forward {
  using Arguments = typename ArgumentsOf<ForwardArguments, C.features.quant != 0>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using T = typename Multiply::T;
  using Source = typename Multiply::Source;
  using Out = Result<C.dtype, C.features.partial != 0>;
  using Tiles = TilesOfKeys<C>;
  static constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_k, kColumns = C.head_dim_v / C.threads_k;
  static constexpr int WM = piece<T>(kRows), WN = piece<T>(kKeys);

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    static_assert(sizeof(Walk<Tiles>) <= C.walk_bytes());
    const Inputs &in = a.in;

    constexpr Features F = C.features;
    Item item = Item::of(blockIdx.x, a.splits, query_tiles<F, C.tile_q>(in), in.heads, in.batch, F.band || F.blocks);
    item.tile = F.blocks && !F.part ? longest_query_tile<F, kThreads, C.tile_q>(in, item.batch, item.head, item.tile)
                                    : (i32)query_tiles<F, C.tile_q>(in) - 1 - item.tile;
    const auto [q0, s] = queries_of<F, C.tile_q>(in, item.batch, item.tile);
    const i32 split = item.split, h = item.head, b = item.batch, h_kv = h / in.group;
    const i32 seqlen_q = (i32)s.band.seqlen_q;
    if (q0 >= seqlen_q) return;
    const i32 q1 = min(q0 + C.tile_q, seqlen_q);

    const Source Q(in.q, b, h, s.q0, seqlen_q, in.head_dim);
    const auto all_K = rows_of_k<C, E, Source>(a, s, b, h_kv);
    const auto all_V = rows_of_v<C, E, Source>(a, s, b, h_kv);
    auto &walk = *reinterpret_cast<Walk<Tiles> *>(shared);
    T *P = reinterpret_cast<T *>(shared + C.walk_bytes());
    Multiply multiply(P + C.pt_elements());
    const auto grid = multiply.grid;
    const Scores<C.features, T> scores = scores_of<C, T>(in, s, b);
    const Dropout<C.features> dropout(in);
    const Kept<C> kept(P + C.pt_elements() + 2 * C.stage_elements());

    T O[kRows][kColumns] = {};
    const RowStates rows(multiply.grid, reinterpret_cast<T *>(shared + C.forward_states_at()));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows.m(i) = minus_infinity<T>(), rows.l(i) = T(0);
      if constexpr (C.compensated()) rows.lost(i) = T(0), rows.earlier_m(i) = rows.none();
    }
    if constexpr (C.compensated()) rows.run() = -1;

    // The result's memory holds O of the runs of keys that have ended. What rounding takes when a run joins it stays in O, and the next run
    // begins with that. `invariant`: runs begin at the same keys in every tile of queries. last: O becomes the sum. Its type is generic, so
    // that this code exists for FP32 alone, where Out is T.
    const auto join_earlier = [&](int i, auto last) {
      auto here = grid;
      here.x = computed_here(here.x), here.y = computed_here(here.y);
      const T m = rows.m(i), before = rows.earlier_m(i);
      const bool any = before == before;
      __syncwarp(); // all threads of the row have read it; they write the same
      rows.earlier_m(i) = m;
      const i32 r = q0 + row(here, i);
      if (r >= q1 || last && !any) return;
      const T alpha = any ? exp2((before - reference_of(m, minus_infinity<T>())) * scores.unit) : T(0);
      at_row(a, b, h, s.q0 + r, split, [&]<i32 kCopy>(auto *to, i64 column_stride) {
        update_row<kCopy>(here, to, column_stride, in.head_dim_v, O[i], any, [&](T y, T &x) { return join(y, alpha, x, last); });
      });
    };

    const auto step = [&](const typename Tiles::Tile &tile, const bool &) {
      const i32 k0 = tile.begin, k1 = tile.end;
      decltype(auto) K = rows_of(all_K, tile);
      decltype(auto) V = rows_of(all_V, tile);
      const bool by_position = tile.masked || k1 - k0 < C.tile_k;

      if constexpr (C.compensated()) {
        const i32 here = k0 / (C.run_of_keys() * a.splits);
        if (rows.run() != here && rows.run() >= 0) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) join_earlier(i, false);
        }
        rows.run() = here;
      }
      kept.draw(dropout, b, h, q0, k0);
      // S = Q K^T. Runs wait in P's place, which has been read by then.
      T S[kRows][kKeys] = {};
      multiply.template nt_in_runs<C.head_dim, C.score_run()>(S, Q, q0, K, k0, [&](bool first) {
        auto here = grid;
        here.x = computed_here(here.x), here.y = computed_here(here.y);
        transfer(here, P, [&](T &p, int i, int j) { p = first ? S[i][j] : p + S[i][j], S[i][j] = T(0); });
      });
      if constexpr (C.head_dim > C.score_run()) transfer(grid, P, [&](T &p, int i, int j) { S[i][j] += p; });

      T alpha[kRows];
      score<kStaged>(scores, h, q0, k0, k1, by_position, S, P, grid);
      if constexpr (C.features.seqused == kPaged) {
        if (all_K.pages.lacks_some(k0, k1, 0, 1)) { // seldom: hides those keys
#pragma unroll
          for (int j = 0; j < kKeys; ++j) {
            const i32 key = k0 + column(grid, j);
            const bool lacks = key < k1 && all_K.pages.lacks(key);
#pragma unroll
            for (int i = 0; i < kRows; ++i) S[i][j] = lacks ? minus_infinity<T>() : S[i][j];
          }
        }
      }
      auto here = grid; // that places of what dropout keeps are not held in registers around the loop
      here.x = computed_here(here.x), here.y = computed_here(here.y);
      // P = exp(S - m), left in shared memory for the threads of the same row: those of one warp
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        T most = S[i][0];
#pragma unroll
        for (int j = 1; j < kKeys; ++j) most = maximum(most, S[i][j]);
        most = grid.reduce(most, [](T x, T y) { return maximum(x, y); });
        RowState<T> state{rows.m(i), rows.l(i)};
        alpha[i] = rescale(state, most, scores.unit, T(0), minus_infinity<T>());
        const T reference = reference_of(state.m, minus_infinity<T>());
        __syncwarp(); // all of the row have read m
        rows.m(i) = state.m;
        T l = C.compensated() ? T(0) : state.l;
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          const T p = exp2((S[i][j] - reference) * scores.unit);
          l += p;
          S[i][j] = kept(row(here, i), column(here, j)) ? p : T(0);
        }
        if constexpr (C.compensated()) {
          T lost = rows.lost(i) * alpha[i];
          add(state.l, lost, l);
          rows.lost(i) = lost, l = state.l;
        }
        rows.l(i) = l;
      }
      transfer(grid, P, [&](T &p, int i, int j) { p = S[i][j]; });
      // O = alpha O + P V, a run of keys after the other. The first barrier comes after all of P is written; that of the next product after
      // all of P is read.
      multiply.template tn_in_runs<C.head_dim_v, C.tile_k, C.pt_stride(), C.run_of_rows(C.tile_k), kRows>(
          P, V, k0, k1 - k0, 0, [&](const auto &PV, int first, bool begins) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
              for (int j = 0; j < size(PV[i]); ++j) O[i][first + j] = fma(O[i][first + j], begins ? alpha[i] : T(1), PV[i][j]);
          });
    };
    if constexpr (F.part)
      walk.run({part_keys<C>(in, s, b, h, q0, q1)}, split, a.splits, step);
    else
      walk.run({Schedule(s.band, q0, q1, C.tile_k, C.invariant ? C.tile_k : 16,
                         F.blocks ? in.blocks.row(b, h, q0 / in.blocks.row_tokens) : BlockRow{})},
               split, a.splits, step);

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      T total = rows.l(i);
      if constexpr (C.compensated()) total -= rows.lost(i), join_earlier(i, true);
      total = grid.reduce(total, [](T x, T y) { return x + y; });
      const i32 r = q0 + row(grid, i);
      if (r >= q1) continue;
      T scale = T(1), most = rows.m(i), to_natural = natural_factor<C.features>(T(in.scale));
      if (a.splits == 1 && in.sinks) { // one more term of the denominator
        const T sink = *in.sinks.template at<const T>(0, h, 0, 0);
        most *= to_natural, to_natural = T(1);
        const T larger = maximum(most, sink), reference = larger == minus_infinity<T>() ? T(0) : larger;
        scale = exp2((most - reference) * kLog2e<T>);
        total = fma(total, scale, exp2((sink - reference) * kLog2e<T>));
        most = larger;
      }
      const bool empty = total == T(0);
      const T lse = empty ? minus_infinity<T>() : row_lse(most, to_natural, total);
      if constexpr (C.features.partial) store_low(a, b, h, s.q0 + r, lse, rest_of_lse(most, to_natural, total, lse), grid);
      scale = empty ? T(0) : scale * Kept<C>::template factor<T>(dropout) / total;
      store(a, b, h, s.q0 + r, split, O[i], scale, lse, grid);
    }
  }

private:
  static __device__ __forceinline__ i32 row(const typename Multiply::Grid &grid, int i) { return grid.template row<WM>(i); }
  static __device__ __forceinline__ i32 column(const typename Multiply::Grid &grid, int j) { return grid.template column<WN>(j); }
  // f(element in shared memory, i, j) for each of the thread's elements of S or P, which lie there a row a key.
  template <class F> static __device__ __forceinline__ void transfer(const typename Multiply::Grid &grid, T *P, F &&f) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j)
#pragma unroll
      for (int i = 0; i < kRows; i += WM) {
        auto &pack = *reinterpret_cast<Pack<T, WM> *>(P + column(grid, j) * C.pt_stride() + row(grid, i));
        Pack<T, WM> x = pack;
#pragma unroll
        for (int w = 0; w < WM; ++w) f(x.x[w], i + w, j);
        pack = x;
      }
  }

  // m and l of the online softmax, in shared memory between tiles. m is the same for all threads of a row; l is of a thread's own keys.
  struct RowStates {
    T *m_, *l_;
    __device__ RowStates(const typename Multiply::Grid &grid, T *shared)
        : m_(shared + grid.template row<WM>(0)), l_(shared + C.tile_q + (i32)threadIdx.x) {}
    __device__ __forceinline__ T &m(int i) const { return m_[WM * C.threads_q * (i / WM) + i % WM]; }
    __device__ __forceinline__ T &l(int i) const { return l_[i * kThreads]; }
    __device__ __forceinline__ T &lost(int i) const { return l_[(kRows + i) * kThreads]; } // what l's roundings added too much
    // m where the last run of keys ended; none(), which is not a number, if none has
    static __device__ __forceinline__ T none() { return -minus_infinity<T>() + minus_infinity<T>(); }
    __device__ __forceinline__ T &earlier_m(int i) const { return (&m(i))[C.tile_q + 2 * kRows * kThreads]; }
    // The number of the run of keys that is being summed, from 0; -1: none
    __device__ __forceinline__ i32 &run() const { return reinterpret_cast<i32 *>(l_)[C.tile_q + 2 * kRows * kThreads]; }
  };

  // Scores that need more than a comparison are made one by one, through shared memory, in a loop that is not unrolled: unrolled it would
  // take the registers of O, and seconds to compile.
  static constexpr bool kStaged = C.features.additive() || C.features.mask;

  template <bool kStage>
  static __device__ __forceinline__ void score(const Scores<C.features, T> &scores, i32 h, i32 q0, i32 k0, i32 k1, bool by_position,
                                               T (&S)[kRows][kKeys], T *P, const typename Multiply::Grid &grid) {
    if constexpr (kStage) {
      transfer(grid, P, [&](T &p, int i, int j) { p = S[i][j]; });
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) {
        const auto r = scores.row(q0 + row(grid, i), h);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          T &s = P[column(grid, j) * C.pt_stride() + row(grid, i)];
          s = scores.score(s, r, k0 + column(grid, j), by_position, k1);
        }
      }
      transfer(grid, P, [&](T &p, int i, int j) { S[i][j] = p; });
    } else if (by_position) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto r = scores.row(q0 + row(grid, i), h);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) S[i][j] = scores.score(S[i][j], r, k0 + column(grid, j), true, k1);
      }
    }
  }

  static __device__ __forceinline__ void store_low(const Arguments &a, i64 b, i64 h, i64 row, T lse, T rest,
                                                   const typename Multiply::Grid &grid) {
    if (grid.x == 0 && a.lse) a.lse.template at<T>(b, h, row, 0)[part_of(a.in).lse_low] = abs(lse) < -minus_infinity<T>() ? rest : T(0);
  }
  static __device__ __forceinline__ i64 split_index(const Arguments &a, i64 b, i64 h, i64 row, i32 split) {
    return split * a.in.rows() + a.in.row_index(b, h, row);
  }
  // f<how rows are copied>(where the row's O belongs, the distance of its columns)
  template <class F> static __device__ __forceinline__ void at_row(const Arguments &a, i64 b, i64 h, i64 row, i32 split, F &&f) {
    if (a.splits > 1)
      f.template operator()<kElements>(a.partial_out + split_index(a, b, h, row, split) * a.in.head_dim_v, 1);
    else
      f.template operator()<C.copy>(a.out.template at<Out>(b, h, row, 0), a.out.stride[3]);
  }
  static __device__ __forceinline__ void store(const Arguments &a, i64 b, i64 h, i64 row, i32 split, const T (&O)[kColumns], T scale, T lse,
                                               const typename Multiply::Grid &grid) {
    at_row(a, b, h, row, split,
           [&]<i32 kCopy>(auto *to, i64 column_stride) { store_row<kCopy>(grid, to, column_stride, a.in.head_dim_v, O, scale); });
    if (grid.x != 0) return;
    if (a.splits > 1)
      a.partial_lse[split_index(a, b, h, row, split)] = (float)lse;
    else if (a.lse)
      *a.lse.template at<T>(b, h, row, 0) = lse;
  }
};

} // namespace strobe::simt
