// Backward (Dao 2023, algorithm 2) with plain FMA: a CTA owns a tile of keys and walks the tiles of queries that see them, of every query
// head of its key head. dK and dV grow in registers; dQ is added up in global memory, in any order, or key tile after key tile where the
// result must be the same over runs.
#pragma once
#include "../attention/dq_sum.h"
#include "../device/tile_order.h"
#include "../device/turns.h"
#include "../ptx/atomic.h"
#include "gradient.h"
#include "walk.h"

namespace strobe::simt {

template <Config C> struct Backward {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using T = typename Multiply::T;
  using Source = typename Multiply::Source;
  using Gradient = Result<C.dtype, C.features.unrounded_gradients()>;
  using Tiles = TilesOfQueries<C>;
  static constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_q; // dQ's rows of a thread; dK's and dV's
  static constexpr int kColumns = C.head_dim / C.threads_k, kColumnsV = C.head_dim_v / C.threads_k;
  // Sums over many queries are made in parts, of a head or of this many tiles, because that rounds less. In FP32 the parts may be long,
  // since each tile is summed by itself (add_product). 16-bit types do without: rounding the output would hide the difference.
  static constexpr i32 kFlush = sizeof(E) == sizeof(T) ? (C.dtype == kF32 ? 2048 : 512) / C.tile_q : 0;
  static constexpr int kPass = C.columns_at_once(C.head_dim); // columns of dQ

  // In shared memory, for registers are short.
  struct Operands {
    Source Q, dO, K, V;
    Sequence sequence;
    Dropout<C.features> dropout;
  };

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    static_assert(sizeof(Walk<Tiles>) + sizeof(Operands) <= C.walk_bytes());
    const Inputs &in = a.in;
    constexpr i32 kPlace = max(C.p_elements(), C.pt_elements());
    auto &walk = *reinterpret_cast<Walk<Tiles> *>(shared);
    T *P = reinterpret_cast<T *>(shared + C.walk_bytes()), *dS = P + kPlace;
    const RowStatistics<C, T> rows(dS + kPlace);
    Multiply multiply(dS + kPlace + 3 * C.tile_q);
    const auto grid = multiply.grid;

    u32 number = blockIdx.x;
    if (a.deterministic) { // Key tiles wait for the ones before them, so those must have started: numbers in the order of arrival.
      u32 &ticket = *reinterpret_cast<u32 *>(P);
      if (threadIdx.x == 0) ticket = fetch_add(a.turns, 1);
      __syncthreads();
      number = ticket;
    }
    Item item = Item::of(number, 1, key_tiles<C.features, C.tile_k>(in), in.heads_kv, in.batch,
                         C.features.band || C.features.blocks || a.deterministic);
    if constexpr (C.features.blocks && !C.features.part)
      if (!a.deterministic) item.tile = longest_key_tile<C.features, kThreads, C.tile_k>(in, item.batch, item.head, item.tile);
    const i32 n = item.tile, h_kv = item.head, b = item.batch;
    auto &[all_Q, all_dO, K, V, sequence, dropout] = *reinterpret_cast<Operands *>(shared + sizeof(walk));
    // Of a part, the sequence as this tile of keys sees it; k0 and seqlen_k are where the tile begins and ends.
    if (threadIdx.x == 0) {
      if constexpr (C.features.part)
        sequence = keys_at(in, b, part_tile(held_keys(in, b), n, C.tile_k, C.features.blocks != 0));
      else
        sequence = in.sequence<C.features.seqused>(b);
      dropout = Dropout<C.features>(in);
    }
    __syncthreads();
    const i32 seqlen_q = (i32)sequence.band.seqlen_q, seqlen_k = (i32)sequence.band.seqlen_k, k0 = first_key(in, b, n),
              k1 = min(k0 + C.tile_k, seqlen_k);
    if (k0 >= seqlen_k) return;
    if (threadIdx.x == 0) K = {k_of<E>(in, sequence, b, h_kv), seqlen_k}, V = {v_of<E>(in, sequence, b, h_kv), seqlen_k};
    const Kept<C> kept(dS + kPlace + 3 * C.tile_q + 2 * C.stage_elements());

    T dK[kKeys][kColumns] = {}, dV[kKeys][kColumnsV] = {};
    i32 summed = 0;                      // tiles in dK and dV
    bool flushed = C.features.adds != 0; // what is there stays
    const auto flush = [&] {
      store<kColumns>(a.dk, b, h_kv, sequence.k0 + k0, k1 - k0, in.head_dim, dK, T(in.scale), flushed, grid);
      store<kColumnsV>(a.dv, b, h_kv, sequence.k0 + k0, k1 - k0, in.head_dim_v, dV, Kept<C>::template factor<T>(dropout), flushed, grid);
      flushed = true;
    };
    for (i32 h = h_kv * in.group; h < (h_kv + 1) * in.group; ++h) {
      if (threadIdx.x == 0)
        all_Q = {in.q, b, h, sequence.q0, seqlen_q, in.head_dim}, all_dO = {a.dout, b, h, sequence.q0, seqlen_q, in.head_dim_v};
      const BlockRow row = C.features.blocks ? in.blocks_t.row(b, h, k0 / in.blocks_t.row_tokens) : BlockRow{};
      const auto step = [&](const typename Tiles::Tile &tile, const bool &more) {
        const i32 q0 = tile.begin, q1 = tile.end;
        decltype(auto) s = sequence_of(sequence, tile);
        decltype(auto) Q = rows_of(all_Q, tile);
        decltype(auto) dO = rows_of(all_dO, tile);
        const Scores<C.features, T> scores = scores_of<C, T>(in, s, b);
        rows.load(a, b, h, s, q0, q1);
        recompute<C>(multiply, scores, dropout, kept, rows, P, dS, Q, K, dO, V, h, q0, q1, k0, k1, tile.masked,
                     [](T &p, T &ds, T x, bool kept, T gradient, T slope) {
                       p = kept ? x : T(0);
                       ds = gradient * slope;
                     });

        add_product(dV, multiply, P, dO, q0, q1 - q0); // dV += P^T dO
        __syncthreads();
        T *const dS_t = P; // P has been read: dS, a line a key
        transpose(dS_t, dS, grid);
        add_product(dK, multiply, dS, Q, q0, q1 - q0); // dK += dS^T Q
        if (a.dq_sum) {
#pragma unroll 1
          for (i32 column = 0; column < C.head_dim; column += kPass) {
            T dQ[kRows][kPass / C.threads_k] = {};
            multiply.template tn<kPass, C.tile_k, C.pt_stride()>(dQ, dS_t, K, k0, k1 - k0, column); // dQ = dS K
            if (a.deterministic && column == 0) take_turn(a, b, h, s, tile, n);
            add_dq(a, b, h, s, q0, q1, n, column, dQ, grid);
          }
          if (a.deterministic) leave_turn(a, b, h, tile);
        }
        __syncthreads(); // P, dS and the rows' statistics have been read
        if (kFlush && (++summed == kFlush || !more)) {
          flush();
          summed = 0;
        }
      };
      // The last queries first: all key tiles of a head see those, even under a causal mask, and do not wait long for their turn.
      if constexpr (C.features.part)
        walk.run({{held_queries(in, b), sequence.band, k0, k1, C.tile_k, row}}, 0, 1, step);
      else
        walk.run({{sequence.band, k0, k1, C.tile_k, row}, seqlen_q}, 0, 1, step);
    }
    if (!kFlush || !flushed) flush();
  }

private:
  static __device__ __forceinline__ i32 first_key(const Inputs &in, i32 b, i32 number) {
    if constexpr (C.features.part) return part_tile(held_keys(in, b), number, C.tile_k, C.features.blocks != 0).begin;
    return number * C.tile_k;
  }
  // sum += x^T B over a tile of queries. In FP32 runs of queries are first summed by themselves: after a row with a large part in the sum,
  // each product that is added singly would be rounded to the last bit of that large sum.
  template <int kColumns>
  static __device__ __forceinline__ void add_product(T (&sum)[kKeys][kColumns], Multiply &multiply, const T *x, const Source &B, i32 q0,
                                                     i32 count) {
    constexpr int kDim = kColumns * C.threads_k;
    if constexpr (C.dtype == kF32) {
      constexpr int kAtOnce = C.columns_at_once(kDim), kPart = kAtOnce / C.threads_k;
      static_assert(piece<T>(kPart) == piece<T>(kColumns), "a part's columns are as many of the sum's, side by side");
#pragma unroll
      for (int first = 0; first < kColumns; first += kPart)
        multiply.template tn_in_runs<kAtOnce, C.tile_q, C.p_stride(), C.run_of_rows(C.tile_q), kKeys>(
            x, B, q0, count, first * C.threads_k, [&](const auto &part, int of_part, bool) {
#pragma unroll
              for (int i = 0; i < kKeys; ++i)
#pragma unroll
                for (int j = 0; j < size(part[i]); ++j) sum[i][first + of_part + j] += part[i][j];
            });
    } else {
      multiply.template tn<kDim, C.tile_q, C.p_stride()>(sum, x, B, q0, count);
    }
  }
  // Each thread's own elements, as recompute left them.
  static __device__ __forceinline__ void transpose(T *to, const T *from, const typename Multiply::Grid &grid) {
    constexpr int kAcross = C.tile_k / C.threads_k, WM = piece<T>(kRows), WN = piece<T>(kAcross);
#pragma unroll
    for (int i = 0; i < kRows; i += WM)
#pragma unroll
      for (int j = 0; j < kAcross; j += WN) {
        const i32 r = grid.template row<WM>(i), c = grid.template column<WN>(j);
        Pack<T, WN> x[WM];
#pragma unroll
        for (int m = 0; m < WM; ++m) x[m] = read<T, WN>(from + (r + m) * C.p_stride() + c);
#pragma unroll
        for (int n = 0; n < WN; ++n) {
          Pack<T, WM> y;
#pragma unroll
          for (int m = 0; m < WM; ++m) y.x[m] = x[m].x[n];
          *reinterpret_cast<Pack<T, WM> *>(to + (c + n) * C.pt_stride() + r) = y;
        }
      }
  }
  static __device__ __forceinline__ u32 *turn_of(const Arguments &a, i64 b, i64 h, const Tile &tile) {
    return a.turns + 1 + (b * a.in.heads + h) * div_up(a.in.seqlen_q, C.tile_q) + tile.begin / C.tile_q;
  }
  static __device__ __forceinline__ u32 *turn_of(const Arguments &a, i64 b, i64 h, const NumberedTile &tile) {
    return a.turns + 1 + (b * a.in.heads + h) * query_tiles<C.features, C.tile_q>(a.in) + tile.number;
  }
  template <class Tile> static __device__ void take_turn(const Arguments &a, i32 b, i32 h, const Sequence &s, const Tile &tile, i32 n) {
    if (threadIdx.x == 0) {
      u32 before;
      if constexpr (C.features.part)
        before = part_tiles_before<C.features.blocks != 0, C.tile_k>(a.in, s.band, b, h, tile.begin, tile.end, n);
      else
        before = key_tiles_before<C.features.blocks != 0, C.tile_k>(a.in, s.band, b, h, tile.begin, n * C.tile_k);
      const u32 *turn = turn_of(a, b, h, tile);
      await_turn<C.features.blocks != 0>(turn, load_acquire(turn), before);
    }
    __syncthreads();
  }
  template <class Tile> static __device__ void leave_turn(const Arguments &a, i64 b, i64 h, const Tile &tile) {
    __syncthreads();
    if (threadIdx.x == 0) end_turn(turn_of(a, b, h, tile));
  }

  static __device__ __forceinline__ void add_dq(const Arguments &a, i64 b, i64 h, const Sequence &s, i32 q0, i32 q1, i32 n, i32 column,
                                                const T (&dQ)[kRows][kPass / C.threads_k], const typename Multiply::Grid &grid) {
    constexpr int kColumns = kPass / C.threads_k, W = piece<T>(kColumns);
    const T scale = T(a.in.scale);
    T *sum = reinterpret_cast<T *>(a.dq_sum) + a.in.row_index(b, h, s.q0 + q0) * C.head_dim + column;
    if constexpr (C.dtype == kF32) sum += dq_sum_of(n * C.tile_k, a.dq_sums) * a.in.rows() * C.head_dim;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (const i32 r = grid.template row<piece<T>(kRows)>(i); q0 + r < q1)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) atomicAdd(sum + r * C.head_dim + grid.template column<W>(j), dQ[i][j] * scale);
  }

  template <int kColumns> // a thread's columns are adjacent in pieces, as Products::tn left them
  static __device__ __forceinline__ void store(const Operand &to, i64 b, i64 h, i64 row, i32 count, i32 columns, T (&x)[kKeys][kColumns],
                                               T scale, bool add, typename Multiply::Grid grid) {
    grid.x = computed_here(grid.x), grid.y = computed_here(grid.y);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const i32 r = grid.template row<piece<T>(kKeys)>(i);
      if (to && r < count) store_row<C.copy>(grid, to.at<Gradient>(b, h, row + r, 0), to.stride[3], columns, x[i], scale, add);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) x[i][j] = T(0);
    }
  }
};

} // namespace strobe::simt
