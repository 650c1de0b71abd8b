// Backward (Dao 2023, algorithm 2) with plain FMA: a CTA owns a tile of keys and walks over the query tiles that see them, in every query
// head of its key head. dK and dV accumulate in registers. dQ is added up in global memory: in any order, or key tile after key tile if the
// result must be the same in every run.
#pragma once
#include "../attention/dq_sum.h"
#include "../device/tile_order.h"
#include "../device/turns.h"
#include "../ptx/atomic.h"
#include "gradient.h"
#include "walk.h"

namespace strobe::simt {

template <Config C> struct Backward {
  static constexpr Features F = C.features;
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using T = typename Multiply::T;
  using Source = typename Multiply::Source;
  using Gradient = Result<C.dtype, F.unrounded_gradients()>;
  using Tiles = TilesOfQueries<C>;
  using Tile = typename Tiles::Tile;
  using Grid = typename Multiply::Grid;
  static constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_q; // rows per thread: of dQ; of dK and dV
  static constexpr int kColumns = C.head_dim / C.threads_k, kColumnsV = C.head_dim_v / C.threads_k;
  // Sums over many queries are divided into runs, because that rounds less. A run covers at most one head and this many tiles. In FP32 runs
  // may be long, because each tile is summed by itself (add_product). 16-bit types need no runs: rounding the output hides the difference.
  static constexpr i32 kFlush = sizeof(E) == sizeof(T) ? (C.dtype == kF32 ? 2048 : 512) / C.tile_q : 0;
  static constexpr int kPass = C.columns_at_once(C.head_dim); // columns of dQ that are added at a time

  // This state lies in shared memory, because registers are scarce.
  struct Operands {
    Source Q, dO, K, V;
    Sequence sequence;
    Dropout<F> dropout;
  };

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    Backward block(a, shared);
    if (block.choose_keys()) block.compute();
  }

private:
  static constexpr i32 kPlace = max(C.p_elements(), C.pt_elements());

  const Arguments &a;
  const Inputs &in;
  Walk<Tiles> &walk;
  Operands &operands;
  T *const P, *const dS; // in shared memory
  const RowStatistics<C, T> rows;
  Multiply multiply;
  const Grid grid;
  const Kept<C> kept;
  i32 n, h_kv, b, k0, k1; // n: the number of the key tile, whose keys are [k0, k1)

  __device__ __forceinline__ Backward(const Arguments &a, unsigned char *shared)
      : a(a), in(a.in), walk(*reinterpret_cast<Walk<Tiles> *>(shared)), operands(*reinterpret_cast<Operands *>(shared + sizeof(walk))),
        P(reinterpret_cast<T *>(shared + C.walk_bytes())), dS(P + kPlace), rows(dS + kPlace), multiply(dS + kPlace + 3 * C.tile_q),
        grid(multiply.grid), kept(dS + kPlace + 3 * C.tile_q + 2 * C.stage_elements()) {
    static_assert(sizeof(Walk<Tiles>) + sizeof(Operands) <= C.walk_bytes());
  }

  // Returns whether the tile has keys.
  __device__ __forceinline__ bool choose_keys() {
    u32 number = blockIdx.x;
    // Key tiles wait for earlier ones. Tiles are numbered in the order of arrival, so that the earlier ones have started.
    if (a.deterministic) {
      u32 &ticket = *reinterpret_cast<u32 *>(P);
      if (threadIdx.x == 0) ticket = fetch_add(a.ticket, 1);
      __syncthreads();
      number = ticket;
    }
    Item item = Item::of(number, 1, key_tiles<F, C.tile_k>(in), in.heads_kv, in.batch, F.band || F.blocks || a.deterministic);
    if constexpr (F.blocks && !F.part)
      if (!a.deterministic) item.tile = longest_key_tile<F, kThreads, C.tile_k>(in, item.batch, item.head, item.tile);
    n = item.tile, h_kv = item.head, b = item.batch;
    // In a part: the sequence as this key tile sees it; k0 and seqlen_k are where the tile begins and ends.
    Sequence &sequence = operands.sequence;
    if (threadIdx.x == 0) {
      if constexpr (F.part)
        sequence = keys_at(in, b, part_tile(held_keys(in, b), n, C.tile_k, F.blocks != 0));
      else
        sequence = in.sequence<F>(b);
      operands.dropout = Dropout<F>(in);
    }
    __syncthreads();
    const i32 seqlen_k = (i32)sequence.band.seqlen_k;
    k0 = first_key(), k1 = min(k0 + C.tile_k, seqlen_k);
    if (k0 >= seqlen_k) return false;
    if (threadIdx.x == 0) operands.K = {k_of<E>(in, sequence, b, h_kv), seqlen_k}, operands.V = {v_of<E>(in, sequence, b, h_kv), seqlen_k};
    return true;
  }
  __device__ __forceinline__ i32 first_key() const {
    if constexpr (F.part) return part_tile(held_keys(in, b), n, C.tile_k, F.blocks != 0).begin;
    return n * C.tile_k;
  }

  __device__ __forceinline__ void compute() {
    const Sequence &sequence = operands.sequence;
    const i32 seqlen_q = (i32)sequence.band.seqlen_q;
    T dK[kKeys][kColumns] = {}, dV[kKeys][kColumnsV] = {};
    i32 summed = 0;             // how many tiles dK and dV have summed
    bool flushed = F.adds != 0; // whether flush() adds to what the tensor holds
    for (i32 h = h_kv * in.group; h < (h_kv + 1) * in.group; ++h) {
      if (threadIdx.x == 0) {
        operands.Q = {in.q, b, h, sequence.q0, seqlen_q, in.head_dim};
        operands.dO = {a.dout, b, h, sequence.q0, seqlen_q, in.head_dim_v};
      }
      const BlockRow row = F.blocks ? in.blocks_t.row(b, h, k0 / in.blocks_t.row_tokens) : BlockRow{};
      const auto step_of = [&](const Tile &tile, const bool &more) {
        step(dK, dV, h, tile);
        if (kFlush && (++summed == kFlush || !more)) {
          flush(dK, dV, flushed);
          summed = 0;
        }
      };
      // The last queries come first: all key tiles of a head see them, even under a causal mask, so no key tile waits long for its turn.
      if constexpr (F.part)
        walk.run({{held_queries(in, b), sequence.band, k0, k1, C.tile_k, row}}, 0, 1, step_of);
      else
        walk.run({{sequence.band, k0, k1, C.tile_k, row}, seqlen_q, in.template to_full_t<F>()}, 0, 1, step_of);
    }
    if (!kFlush || !flushed) flush(dK, dV, flushed);
  }

  // One query tile of head h: computes P and dS, and adds to each gradient.
  __device__ __forceinline__ void step(T (&dK)[kKeys][kColumns], T (&dV)[kKeys][kColumnsV], i32 h, const Tile &tile) {
    const i32 q0 = tile.begin, q1 = tile.end;
    decltype(auto) s = sequence_of(operands.sequence, tile);
    decltype(auto) Q = rows_of(operands.Q, tile);
    decltype(auto) dO = rows_of(operands.dO, tile);
    const Scores<F, T> scores = scores_of<C, T>(in, s, b);
    rows.load(a, b, h, s, q0, q1);
    recompute<C>(multiply, scores, operands.dropout, kept, rows, P, dS, Q, operands.K, dO, operands.V, h, q0, q1, k0, k1, tile.masked,
                 tile.open, [](T &p, T &ds, T x, bool kept, T gradient, T slope) {
                   p = kept ? x : T(0);
                   ds = gradient * slope;
                 });
    add_product(dV, P, dO, q0, q1 - q0); // dV += P^T dO
    __syncthreads();
    T *const dS_t = P; // P has been read; dS takes its memory, one line per key
    transpose(dS_t, dS);
    add_product(dK, dS, Q, q0, q1 - q0); // dK += dS^T Q
    if (a.dq_sum) add_dq(dS_t, h, s, tile);
    __syncthreads(); // P, dS, LSE and D of the tile have been read
  }

  // sum += x^T B over a query tile. In FP32, runs of queries are first summed by themselves. Otherwise, after a row with a large term,
  // every single product would be rounded to the last bit of that large sum.
  template <int kColumns>
  __device__ __forceinline__ void add_product(T (&sum)[kKeys][kColumns], const T *x, const Source &B, i32 q0, i32 count) {
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
  // Transposes each thread's own elements, in the layout of recompute().
  __device__ __forceinline__ void transpose(T *to, const T *from) const {
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
  // dQ += dS K, in global memory, some columns at a time.
  __device__ __forceinline__ void add_dq(const T *dS_t, i32 h, const Sequence &s, const Tile &tile) {
#pragma unroll 1
    for (i32 column = 0; column < C.head_dim; column += kPass) {
      T dQ[kRows][kPass / C.threads_k] = {};
      multiply.template tn<kPass, C.tile_k, C.pt_stride()>(dQ, dS_t, operands.K, k0, k1 - k0, column);
      if (a.deterministic && column == 0) take_turn(h, s, tile);
      add_columns(dQ, h, s, tile, column);
    }
    if (a.deterministic) leave_turn(h, tile);
  }
  __device__ __forceinline__ void add_columns(const T (&dQ)[kRows][kPass / C.threads_k], i64 h, const Sequence &s, const Tile &tile,
                                              i32 column) const {
    constexpr int kColumns = kPass / C.threads_k, W = piece<T>(kColumns);
    const T scale = T(in.scale);
    T *sum = reinterpret_cast<T *>(a.dq_sum) + in.row_index(b, h, s.q0 + tile.begin) * C.head_dim + column;
    if constexpr (C.dtype == kF32) sum += dq_sum_of(n * C.tile_k, a.dq_sums) * in.rows() * C.head_dim;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (const i32 r = grid.template row<piece<T>(kRows)>(i); tile.begin + r < tile.end)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) atomicAdd(sum + r * C.head_dim + grid.template column<W>(j), dQ[i][j] * scale);
  }
  __device__ __forceinline__ u32 *turn_of(i64 h, const Tile &tile) const {
    u32 *const of_head = a.turns + ((i64)b * in.heads + h) * query_tiles<F, C.tile_q>(in);
    if constexpr (F.part)
      return of_head + tile.number;
    else
      return of_head + tile.begin / C.tile_q;
  }
  __device__ __forceinline__ void take_turn(i32 h, const Sequence &s, const Tile &tile) const {
    if (threadIdx.x == 0) {
      u32 before;
      if constexpr (F.part)
        before = part_tiles_before<F.blocks != 0, C.tile_k>(in, s.band, b, h, tile.begin, tile.end, n);
      else
        before = key_tiles_before<F.blocks != 0, C.tile_k>(in, s.band, b, h, tile.begin, n * C.tile_k);
      const u32 *turn = turn_of(h, tile);
      await_turn<F.blocks != 0>(turn, load_acquire(turn), before);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void leave_turn(i64 h, const Tile &tile) const {
    __syncthreads();
    if (threadIdx.x == 0) end_turn(turn_of(h, tile));
  }

  // Stores dK and dV and sets them to 0. add: whether to add them to what the tensor holds; it becomes true.
  __device__ __forceinline__ void flush(T (&dK)[kKeys][kColumns], T (&dV)[kKeys][kColumnsV], bool &add) const {
    const i64 row = operands.sequence.k0 + k0;
    store(a.dk, row, in.head_dim, dK, T(in.scale), add);
    store(a.dv, row, in.head_dim_v, dV, Kept<C>::template factor<T>(operands.dropout), add);
    add = true;
  }
  template <int kColumns> // a thread's columns are adjacent in pieces, in the layout of Products::tn
  __device__ __forceinline__ void store(const Operand &to, i64 row, i32 columns, T (&x)[kKeys][kColumns], T scale, bool add) const {
    const i64 batch = b, head = h_kv;
    Grid here = grid;
    here.x = computed_here(here.x), here.y = computed_here(here.y);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const i32 r = here.template row<piece<T>(kKeys)>(i);
      if (to && r < k1 - k0) store_row<C.copy>(here, to.at<Gradient>(batch, head, row + r, 0), to.stride[3], columns, x[i], scale, add);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) x[i][j] = T(0);
    }
  }
};

} // namespace strobe::simt
