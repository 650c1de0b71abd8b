// Forward, FlashAttention-2 (Dao 2023) with plain FMA: a CTA owns a tile of queries and walks over the tiles of keys that they see.
#pragma once
#include "../ptx/math.h" // included first: softmax.h finds exp2 and select there

#include "../attention/softmax.h"
#include "../device/tile_order.h"
#include "part.h"

namespace strobe::simt {

template <Config C> struct Forward {
  static constexpr Features F = C.features;
  using Arguments = typename ArgumentsOf<ForwardArguments, F.quant != 0>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using T = typename Multiply::T;
  using Source = typename Multiply::Source;
  using Out = Result<C.dtype, F.partial != 0>;
  using Tiles = TilesOfKeys<C>;
  using Tile = typename Tiles::Tile;
  using Grid = typename Multiply::Grid;
  static constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_k, kColumns = C.head_dim_v / C.threads_k;
  static constexpr int WM = piece<T>(kRows), WN = piece<T>(kKeys);

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    Item item = Item::of(blockIdx.x, a.splits, query_tiles<F, C.tile_q>(in), in.heads, in.batch, F.band || F.blocks);
    item.tile = F.blocks && !F.part ? longest_query_tile<F, kThreads, C.tile_q>(in, item.batch, item.head, item.tile)
                                    : (i32)query_tiles<F, C.tile_q>(in) - 1 - item.tile;
    const auto [q0, sequence] = queries_of<F, C.tile_q>(in, item.batch, item.tile);
    if (q0 < (i32)sequence.band.seqlen_q) Forward(a, item, sequence, q0, shared).compute();
  }

private:
  // m and l of the online softmax, in shared memory between tiles. m is the same for all threads of a row; l covers a thread's own keys.
  struct RowStates {
    T *m_, *l_;
    __device__ RowStates(const Grid &grid, T *shared) : m_(shared + grid.template row<WM>(0)), l_(shared + C.tile_q + (i32)threadIdx.x) {}
    __device__ __forceinline__ T &m(int i) const { return m_[WM * C.threads_q * (i / WM) + i % WM]; }
    __device__ __forceinline__ T &l(int i) const { return l_[i * kThreads]; }
    __device__ __forceinline__ T &lost(int i) const { return l_[(kRows + i) * kThreads]; } // the rounding error of l
    // m of the row when the last run of keys ended; none(), which is NaN, before the first run has ended.
    static __device__ __forceinline__ T none() { return -minus_infinity<T>() + minus_infinity<T>(); }
    __device__ __forceinline__ T &earlier_m(int i) const { return (&m(i))[C.tile_q + 2 * kRows * kThreads]; }
    // The number of the run of keys that is being summed, from 0 on; -1: no run has begun
    __device__ __forceinline__ i32 &run() const { return reinterpret_cast<i32 *>(l_)[C.tile_q + 2 * kRows * kThreads]; }
  };
  const Arguments &a;
  const Inputs &in;
  const Sequence sequence;
  const i32 b, h, split, q0, q1; // q0, q1: the bounds of the query tile
  Walk<Tiles> &walk;
  T *const P; // in shared memory, one line per key
  Multiply multiply;
  const Grid grid;
  const Source Q;
  const Scores<F, T> scores;
  const Dropout<F> dropout;
  const Kept<C> kept;
  const RowStates rows;

  __device__ __forceinline__ Forward(const Arguments &a, const Item &item, const Sequence &sequence, i32 q0, unsigned char *shared)
      : a(a), in(a.in), sequence(sequence), b(item.batch), h(item.head), split(item.split), q0(q0),
        q1(min(q0 + C.tile_q, (i32)sequence.band.seqlen_q)), walk(*reinterpret_cast<Walk<Tiles> *>(shared)),
        P(reinterpret_cast<T *>(shared + C.walk_bytes())), multiply(P + C.pt_elements()), grid(multiply.grid),
        Q(in.q, b, h, sequence.q0, (i32)sequence.band.seqlen_q, in.head_dim), scores(scores_of<C, T>(in, sequence, b)), dropout(in),
        kept(P + C.pt_elements() + 2 * C.stage_elements()), rows(grid, reinterpret_cast<T *>(shared + C.forward_states_at())) {
    static_assert(sizeof(Walk<Tiles>) <= C.walk_bytes());
  }

  __device__ __forceinline__ void compute() {
    const auto K = rows_of_k<C, E, Source>(a, sequence, b, h / in.group);
    const auto V = rows_of_v<C, E, Source>(a, sequence, b, h / in.group);
    T O[kRows][kColumns] = {};
    begin_rows();
    const auto step_of = [&](const Tile &tile, const bool &) { step(O, K, V, tile); };
    if constexpr (F.part)
      walk.run({part_keys<C>(in, sequence, b, h, q0, q1)}, split, a.splits, step_of);
    else
      walk.run({Schedule(sequence.band, q0, q1, C.tile_k, C.invariant ? C.tile_k : 16,
                         F.blocks ? in.template block_row<F>(b, h, q0 / in.blocks.row_tokens) : BlockRow{})},
               split, a.splits, step_of);
    finish_rows(O);
  }

  __device__ __forceinline__ void begin_rows() const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows.m(i) = minus_infinity<T>(), rows.l(i) = T(0);
      if constexpr (C.compensated()) rows.lost(i) = T(0), rows.earlier_m(i) = rows.none();
    }
    if constexpr (C.compensated()) rows.run() = -1;
  }

  // Adds the keys of a tile to O.
  template <class RowsOfK, class RowsOfV>
  __device__ __forceinline__ void step(T (&O)[kRows][kColumns], const RowsOfK &all_K, const RowsOfV &all_V, const Tile &tile) {
    decltype(auto) K = rows_of(all_K, tile);
    decltype(auto) V = rows_of(all_V, tile);
    const bool by_position = tile.masked || tile.end - tile.begin < C.tile_k;
    if constexpr (C.compensated()) begin_run(O, tile.begin);
    kept.draw(dropout, b, h, q0, tile.begin);
    T S[kRows][kKeys] = {}, alpha[kRows];
    multiply_q_k(S, K, tile.begin);
    score(S, tile, by_position);
    if constexpr (F.pages) hide_lacking(S, all_K.pages, tile);
    make_p(alpha, S);
    add_p_v(O, alpha, V, tile);
  }

  // Restarts O where the tile's keys begin a run.
  __device__ __forceinline__ void begin_run(T (&O)[kRows][kColumns], i32 k0) const {
    const i32 here = k0 / (C.run_of_keys() * a.splits);
    if (rows.run() != here && rows.run() >= 0) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) join_earlier(O[i], i, false);
    }
    rows.run() = here;
  }
  // Adds O to the O of the finished runs of keys, which lies in the result's memory. The rounding error stays in O, and the next run begins
  // with it. last: O becomes the sum instead. Only FP32 has runs. With `invariant` runs begin at the same keys in every query tile.
  __device__ __forceinline__ void join_earlier(T (&O)[kColumns], int i, bool last) const {
    const Grid here = place_here();
    const T m = rows.m(i), before = rows.earlier_m(i);
    const bool any = before == before;
    __syncwarp(); // all threads of the row have read earlier_m; all write the same value
    rows.earlier_m(i) = m;
    const i32 r = q0 + row(here, i);
    if (r >= q1 || last && !any) return;
    const T alpha = any ? exp2((before - reference_of(m, minus_infinity<T>())) * scores.unit) : T(0);
    at_row(sequence.q0 + r, [&]<i32 kCopy>(auto *to, i64 column_stride) {
      update_row<kCopy>(here, to, column_stride, in.head_dim_v, O, any, [&](T y, T &x) { return join(y, alpha, x, last); });
    });
  }

  // S = Q K^T. For heads wider than score_run(), S is summed in runs of that many columns. The sum of finished runs waits in P's memory;
  // when the first run ends, all threads have read the previous tile's P.
  template <class RowsOfK> __device__ __forceinline__ void multiply_q_k(T (&S)[kRows][kKeys], const RowsOfK &K, i32 k0) {
    multiply.template nt_in_runs<C.head_dim, C.score_run()>(S, Q, q0, K, k0, [&](bool first) {
      transfer(place_here(), P, [&](T &p, int i, int j) { p = first ? S[i][j] : p + S[i][j], S[i][j] = T(0); });
    });
    if constexpr (C.head_dim > C.score_run()) transfer(grid, P, [&](T &p, int i, int j) { S[i][j] += p; });
  }

  // Scores that need more than a comparison are computed one by one, through shared memory, in a loop that is not unrolled. Unrolled, it
  // would take the registers of O, and seconds to compile.
  static constexpr bool kStaged = F.by_element();

  __device__ __forceinline__ void score(T (&S)[kRows][kKeys], const Tile &tile, bool by_position) const {
    const i32 k0 = tile.begin, k1 = tile.end;
    if constexpr (kStaged) {
      transfer(grid, P, [&](T &p, int i, int j) { p = S[i][j]; });
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) {
        const auto r = scores.row(q0 + row(grid, i), h);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          T &s = P[column(grid, j) * C.pt_stride() + row(grid, i)];
          s = score_of<C>(scores, s, r, k0 + column(grid, j), by_position, k1, tile.open);
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
  // Hides the keys whose page does not exist. There are rarely any.
  __device__ __forceinline__ void hide_lacking(T (&S)[kRows][kKeys], const SequencePages &pages, const Tile &tile) const {
    if (!pages.lacks_some(tile.begin, tile.end, 0, 1)) return;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const i32 key = tile.begin + column(grid, j);
      const bool lacks = key < tile.end && pages.lacks(key);
#pragma unroll
      for (int i = 0; i < kRows; ++i) S[i][j] = lacks ? minus_infinity<T>() : S[i][j];
    }
  }

  // P = exp(S - m), stored in shared memory for the threads of the same row, which lie in one warp. alpha: the factor of O.
  __device__ __forceinline__ void make_p(T (&alpha)[kRows], T (&S)[kRows][kKeys]) const {
    const Grid here = place_here();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      T most = S[i][0];
#pragma unroll
      for (int j = 1; j < kKeys; ++j) most = maximum(most, S[i][j]);
      most = grid.reduce(most, [](T x, T y) { return maximum(x, y); });
      RowState<T> state{rows.m(i), rows.l(i)};
      alpha[i] = rescale(state, most, scores.unit, T(0), minus_infinity<T>());
      const T reference = reference_of(state.m, minus_infinity<T>());
      __syncwarp(); // every thread of the row has read m
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
  }

  // O = alpha O + P V, one run of keys after another. The first barrier comes after all of P has been written; the barrier of the next
  // product comes after all of P has been read.
  template <class RowsOfV>
  __device__ __forceinline__ void add_p_v(T (&O)[kRows][kColumns], const T (&alpha)[kRows], const RowsOfV &V, const Tile &tile) {
    multiply.template tn_in_runs<C.head_dim_v, C.tile_k, C.pt_stride(), C.run_of_rows(C.tile_k), kRows>(
        P, V, tile.begin, tile.end - tile.begin, 0, [&](const auto &PV, int first, bool begins) {
#pragma unroll
          for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < size(PV[i]); ++j) O[i][first + j] = fma(O[i][first + j], begins ? alpha[i] : T(1), PV[i][j]);
        });
  }

  // Stores O / l and LSE.
  __device__ __forceinline__ void finish_rows(T (&O)[kRows][kColumns]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      T l = rows.l(i);
      if constexpr (C.compensated()) l -= rows.lost(i), join_earlier(O[i], i, true);
      l = grid.reduce(l, [](T x, T y) { return x + y; });
      const i32 r = q0 + row(grid, i);
      if (r >= q1) continue;
      T scale = T(1), m = rows.m(i), to_natural = natural_factor<F>(T(in.scale));
      if (a.splits == 1 && in.sinks) add_sink(m, l, scale, to_natural);
      const bool empty = l == T(0);
      const T lse = empty ? minus_infinity<T>() : row_lse(m, to_natural, l);
      if constexpr (F.partial) store_low(sequence.q0 + r, lse, rest_of_lse(m, to_natural, l, lse));
      scale = empty ? T(0) : scale * Kept<C>::template factor<T>(dropout) / l;
      store(sequence.q0 + r, O[i], scale, lse);
    }
  }
  // Adds the sink, one more term of the denominator. m becomes natural, and scale the factor of O.
  __device__ __forceinline__ void add_sink(T &m, T &l, T &scale, T &to_natural) const {
    const T sink = *in.sinks.template at<const T>(0, h, 0, 0);
    m *= to_natural, to_natural = T(1);
    const T larger = maximum(m, sink), reference = larger == minus_infinity<T>() ? T(0) : larger;
    scale = probability(m, T(1), reference, T(0)); // exp(m - reference): its error is an error of all of O
    l = fma(l, scale, probability(sink, T(1), reference, T(0)));
    m = larger;
  }
  // Stores O and LSE of a row of the tensors.
  __device__ __forceinline__ void store(i64 row, const T (&O)[kColumns], T scale, T lse) const {
    at_row(row, [&]<i32 kCopy>(auto *to, i64 column_stride) { store_row<kCopy>(grid, to, column_stride, in.head_dim_v, O, scale); });
    if (grid.x != 0) return;
    if (a.splits > 1)
      a.partial_lse[row_of_split(row)] = (float)lse;
    else if (a.lse)
      *a.lse.template at<T>(b, h, row, 0) = lse;
  }
  __device__ __forceinline__ void store_low(i64 row, T lse, T rest) const {
    if (grid.x == 0 && a.lse) a.lse.template at<T>(b, h, row, 0)[in.part->lse_low] = abs(lse) < -minus_infinity<T>() ? rest : T(0);
  }
  // Calls f<how rows are copied>(the address of O's row, the distance between its columns).
  template <class Write> __device__ __forceinline__ void at_row(i64 row, Write &&f) const {
    if (a.splits > 1)
      f.template operator()<kElements>(a.partial_out + row_of_split(row) * in.head_dim_v, 1);
    else
      f.template operator()<C.copy>(a.out.template at<Out>(b, h, row, 0), a.out.stride[3]);
  }
  __device__ __forceinline__ i64 row_of_split(i64 row) const { return split * in.rows() + in.row_index(b, h, row); }

  static __device__ __forceinline__ i32 row(const Grid &grid, int i) { return grid.template row<WM>(i); }
  static __device__ __forceinline__ i32 column(const Grid &grid, int j) { return grid.template column<WN>(j); }
  // The grid, read again each time, so that no value derived from it stays in registers around the loop over keys.
  __device__ __forceinline__ Grid place_here() const {
    Grid here = grid;
    here.x = computed_here(here.x), here.y = computed_here(here.y);
    return here;
  }
  // Calls f(element in shared memory, i, j) for each of the thread's elements of S or P. They lie there in one line per key.
  template <class Each> static __device__ __forceinline__ void transfer(const Grid &grid, T *P, Each &&f) {
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
};

} // namespace strobe::simt
