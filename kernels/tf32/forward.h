// FlashAttention-2's forward (Dao 2023, algorithm 1) in FP32 on tensor cores: a thread block owns a tile of queries and walks over the
// tiles of keys. A warp owns tile_q / warps rows, and keeps their S, P, O, m and l in its registers.
#pragma once
#include "../device/nonfinite.h"
#include "../device/query_major_dropout.h"
#include "../device/score_tile.h"
#include "../device/softmax.h"
#include "../device/tile_order.h"
#include "../tile/tf32_multiply.h"
#include "config.h"

namespace strobe::tf32 {

using namespace tile::tf32;

template <Config C> struct Forward {
  using Arguments = ForwardArguments;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v;
  static constexpr int kRows = C.tile_q / C.warps; // per warp
  static constexpr int kM = kRows / 16, kN = C.tile_k / 16, kC = kDv / 16;
  static_assert(kRows % 16 == 0 && C.tile_k % 32 == 0);

  using Item = QueryItem<C.tile_q>; // with block sparsity, the item's tile is at first a rank by length

  static __device__ __forceinline__ void run(const Arguments &a) { Forward(a).compute(); }

private:
  struct Tile { // a tile of keys
    i32 begin, end, masked;
    bool valid, open; // open: the function of the mask has to be asked
  };
  enum : i32 { kLacks = 2 }; // a bit of Tile::masked: some keys are missing, since their pages do not exist
  struct Nothing {};
  // State that the threads share lies in shared memory: registers are scarce.
  struct State {
    Tile ring[4]; // iteration n uses n % 4
    Item item;
    Sequence sequence;
    Schedule schedule;
    const float *k, *v; // row 0; if paged, row 0 of page 0
    i32 nonfinite;      // V holds numbers that are not finite
    typename Either<F.pages != 0, SequencePages, Nothing>::type pages;
  };
  static_assert(sizeof(State) <= C.state_bytes());

  // Where the sum of P of each row of a thread, and its rounding error, lie in shared memory: after the state.
  struct Totals {
    static constexpr bool kJoins = true;
    static __device__ __forceinline__ u32 at(int row) { return shared(kState + C.state_bytes()) + (row * kThreads + thread_index()) * 8; }
    static __device__ __forceinline__ void load(int row, float (&x)[2]) { load_shared(x, at(row)); }
    static __device__ __forceinline__ void store(int row, const float (&x)[2]) { store_shared(at(row), x); }
  };
  using Softmax = RowSoftmax<2 * kM, Totals>;

  const Arguments &a;
  const Inputs &in;
  float unit;

  static constexpr u32 kKBytes = C.tile_k * kD * 4, kVBytes = C.tile_k * kDv * 4;
  static constexpr u32 kK = C.tile_q * kD * 4, kV = kK + C.stages * kKBytes, kState = kV + C.stages * kVBytes; // in shared memory

  __device__ __forceinline__ explicit Forward(const Arguments &a) : a(a), in(a.in) {}

  static __device__ __forceinline__ State &shared_state() { return *(State *)(shared_memory() + kState); }
  static __device__ __forceinline__ u32 shared(u32 offset) { return shared_address(shared_memory()) + offset; }
  static __device__ __forceinline__ int warp_row() { return thread_index() / 32 * kRows; }

  __device__ __forceinline__ void choose_queries() const {
    State &state = shared_state();
    if (threadIdx.x == 0) {
      const Item item(a, blockIdx.x);
      Sequence s = in.sequence<F>(item.b);
      state.item = item, state.sequence = s, state.nonfinite = 0;
      if constexpr (F.pages) state.pages = in.pages.of(item.b);
      state.k = k_of<float, F>(in, s, item.b, item.h / in.group).first, state.v = v_of<float, F>(in, s, item.b, item.h / in.group).first;
    }
    __syncthreads();
    if constexpr (F.blocks) {
      const i32 rank = (i32)div_up(in.seqlen_q, C.tile_q) - 1 - state.item.q / C.tile_q;
      const i32 q = longest_query_tile<F, kThreads, C.tile_q>(in, state.item.b, state.item.h, rank) * C.tile_q;
      if (threadIdx.x == 0) state.item.q = q;
      __syncthreads();
    }
  }
  // Called by one thread.
  __device__ __forceinline__ void begin() const {
    const Item &item = shared_state().item;
    i64 q1 = min((i64)item.q + C.tile_q, shared_state().sequence.band.seqlen_q);
    BlockRow row{nullptr, 0, 0};
    if constexpr (F.blocks) row = in.template block_row<F>(item.b, item.h, item.q / in.blocks.row_tokens);
    shared_state().schedule = Schedule(shared_state().sequence.band, item.q, q1, C.tile_k, 16, row, {item.split, a.splits});
    find(0);
    find(1);
  }
  // Finds the tile of iteration n.
  __device__ __forceinline__ void find(int n) const {
    KeyTile t;
    bool valid = shared_state().schedule.next(t);
    i32 masked = t.masked;
    if constexpr (F.pages) {
      if (valid && shared_state().pages.lacks_some((i32)t.begin, (i32)t.end, 0, 1)) masked = kLacks;
    }
    shared_state().ring[n % 4] = valid ? Tile{(i32)t.begin, (i32)t.end, masked, true, t.open} : Tile{0, 0, 0, false, false};
  }
  __device__ __forceinline__ i32 rows() const {
    return (i32)shared_state().sequence.band.seqlen_q - shared_state().item.q;
  } // rows of Q that exist

  // K and V of the item's key head.
  __device__ __forceinline__ auto k() const { return keys(in.k, shared_state().k, in.head_dim); }
  __device__ __forceinline__ auto v() const { return keys(in.v, shared_state().v, in.head_dim_v); }
  __device__ __forceinline__ auto keys(const Operand &x, const float *first, i32 columns) const {
    if constexpr (F.pages)
      return PagedKeys<float>(x, first, columns, shared_state().pages);
    else
      return Keys<float>(x, first, columns);
  }

  __device__ __forceinline__ void load_q() const {
    const Item &item = shared_state().item;
    const float *q = in.q.at<const float>(item.b, item.h, shared_state().sequence.q0 + item.q, 0);
    tile::tf32::load<C.tile_q, kD, kThreads, C.aligned != 0>(shared(0), {q, in.q.stride[2], in.q.stride[3], rows(), in.head_dim},
                                                             thread_index());
  }
  __device__ __forceinline__ void load_k(const Tile &t, int stage) const {
    const auto k = this->k();
    tile::tf32::load<C.tile_k, kD, kThreads, C.aligned != 0>(shared(kK) + stage * kKBytes, k.rows(t.begin, t.end), thread_index());
  }
  __device__ __forceinline__ void load_v(const Tile &t, int stage) const {
    const auto v = this->v();
    tile::tf32::load<C.tile_k, kDv, kThreads, C.aligned != 0>(shared(kV) + stage * kVBytes, v.rows(t.begin, t.end), thread_index());
  }

  __device__ __forceinline__ void compute() {
    Accumulator O[kM][kC];
    Softmax softmax;
    choose_queries();
    if (rows() <= 0) return;
    unit = Scores<F, float>(in, shared_state().sequence, 0).unit;
    load_q();
#pragma unroll 1
    while (true) {
      walk(O, softmax);
      if (__syncthreads_and(shared_state().nonfinite || softmax.finite(O))) break;
      if (threadIdx.x == 0) shared_state().nonfinite = 1;
    }
    finish(O, softmax);
  }

  __device__ __forceinline__ void walk(Accumulator (&O)[kM][kC], Softmax &softmax) {
#pragma unroll
    for (int i = 0; i < 8 * kM * kC; ++i) O[i / (8 * kC)][i / 8 % kC].x[i / 4 % 2][i % 4] = 0;
    softmax = {};
#pragma unroll
    for (int row = 0; row < 2 * kM; ++row) Totals::store(row, {0, 0});
    float earlier[2 * kM]; // M when the last run of tiles ended; NaN before the first run has ended
#pragma unroll
    for (int row = 0; row < 2 * kM; ++row) earlier[row] = __int_as_float(0x7FC00000);
    if (threadIdx.x == 0) begin();
    __syncthreads();
    if (shared_state().ring[0].valid) load_k(shared_state().ring[0], 0);
    if (shared_state().ring[0].valid && C.stages > 1) load_v(shared_state().ring[0], 0);
    cp_async_commit();
#pragma unroll 1
    for (int n = 0; shared_state().ring[n % 4].valid; ++n) {
      const Tile &tile = shared_state().ring[n % 4], &next = shared_state().ring[(n + 1) % 4];
      int stage = C.stages > 1 ? n % 2 : 0;
      arrive(); // K of this tile (with two stages also V) has arrived, and all threads have read the previous tile
      if (threadIdx.x == 0) find(n + 2);
      if constexpr (C.stages == 1) {
        load_v(tile, 0);
      } else if (next.valid) {
        load_k(next, stage ^ 1);
        load_v(next, stage ^ 1);
      }
      cp_async_commit();

      Accumulator S[kM][kN] = {};
      multiply_rows<kD, C.products, Sum::of_scores>(S, shared(0) + warp_row() * kD * 4, shared(kK) + stage * kKBytes); // S = Q K^T
      score(S, tile);
      softmax.template follow<C.exact_max != 0>(S, exponent(), O);
      if constexpr (C.stages == 1) {
        arrive(); // V has arrived, and all threads have read K
        if (next.valid) load_k(next, 0);
        cp_async_commit();
      }
      if (shared_state().nonfinite) {
        clear_nonfinite_tf32<C.tile_k, kDv, kThreads>(shared(kV) + stage * kVBytes, (int)threadIdx.x);
        const auto v = this->v();
        add_nonfinite_tf32(O, Seen<kM, kN>(S).bits, v.rows(tile.begin, tile.end));
        __syncthreads();
      }
      multiply_p_v(O, S, softmax, tile, stage);
      if ((n + 1) % C.tiles_of_run() == 0) join_earlier(O, softmax, earlier, false);
    }
    cp_async_wait<0>();
    __syncthreads();
    join_earlier(O, softmax, earlier, true);
  }

  // Adds O to the O of the earlier runs of tiles, which lies in the result's memory relative to the M of that time. The rounding error
  // stays in O, and the next run begins with it. last: O becomes the sum instead.
  __device__ __forceinline__ void join_earlier(Accumulator (&O)[kM][kC], const Softmax &softmax, float (&earlier)[2 * kM],
                                               bool last) const {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const float before = earlier[i];
      const bool any = before == before;
      earlier[i] = softmax.M[i];
      const Row row(i);
      if (!row.there || last && !any) continue;
      const float alpha = !any || before == softmax.M[i] ? 1.0f : exp2(exponent().difference(before - softmax.M[i]));
      update_row<C.aligned != 0>(O, i / 2, i % 2, row.out(*this), row.stride(*this), in.head_dim_v, any,
                                 [&](const float &y, bool there, float &x) { return join(there ? y : 0.0f, alpha, x, last); });
    }
  }

  static __device__ __forceinline__ void arrive() {
    cp_async_wait<0>();
    __syncthreads();
  }

  // Replaces q.k by scores.
  __device__ __forceinline__ void score(Accumulator (&S)[kM][kN], const Tile &tile) const {
    const Scores<F, float> scores(in, shared_state().sequence, shared_state().item.b);
    const i32 first = shared_state().item.q + warp_row(), head = shared_state().item.h;
    score_tile(S, scores, tile, [&](int row) { return scores.row(first + 16 * (row / 2) + tile::lane_row(row % 2), head); });
    if constexpr (F.pages) {
      if (tile.masked == kLacks) hide_lacking(S, k(), tile);
    }
  }

  __device__ __forceinline__ auto exponent() const { return exponent_of<F.unbounded()>(unit); }

  // P = exp2(S * unit - M); O += P V
  __device__ __forceinline__ void multiply_p_v(Accumulator (&O)[kM][kC], Accumulator (&S)[kM][kN], Softmax &softmax, const Tile &tile,
                                               int stage) const {
    Pairs<kDv> V(shared(kV) + stage * kVBytes);
    QueryMajorDropout<F> dropout{Dropout<F>(in), (u32)shared_state().item.h, (u32)shared_state().item.b};
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      Left P[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        softmax.exponentiate(S[m][n], 2 * m, exponent());
        softmax.exponentiate(S[m][n + 1], 2 * m, exponent());
        if constexpr (F.dropout) dropout.apply(S[m][n], S[m][n + 1], shared_state().item.q + warp_row() + 16 * m, tile.begin + 16 * n);
        set_left<C.products>(P[m], S[m] + n);
      }
      multiply_pairs<kDv, C.products>(O, P, V, 16 * n);
    }
    softmax.join();
  }

  // Stores O / l and LSE.
  __device__ __forceinline__ void finish(Accumulator (&O)[kM][kC], Softmax &softmax) const {
    const Item item = shared_state().item;
    const float dropped = Dropout<F>(in).factor();
    const float sink = whole() && in.sinks ? *in.sinks.at<const float>(0, item.h, 0, 0) : minus_infinity<float>();
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const RowEnd end = precise_row_end(softmax.M[i], softmax.sum(i), sink, F.unbounded());
      const Row row(i);
      if (!row.there) continue;
      if (first_column() == 0) {
        if (!whole())
          a.partial_lse[row.part(*this)] = end.lse;
        else if (a.lse)
          *a.lse.at<float>(item.b, item.h, row.row, 0) = end.lse;
      }
      store_row<C.aligned != 0>(O, i / 2, i % 2, end.factor * dropped, row.out(*this), row.stride(*this), in.head_dim_v);
    }
  }

  __device__ __forceinline__ bool whole() const { return a.splits == 1; }
  // The i-th row of this thread, and where its O lies.
  struct Row {
    bool there;
    i64 row; // row of the tensors
    __device__ __forceinline__ explicit Row(int i) {
      const i32 q = shared_state().item.q + warp_row() + 16 * (i / 2) + tile::lane_row(i % 2);
      there = q < shared_state().sequence.band.seqlen_q, row = shared_state().sequence.q0 + q;
    }
    __device__ __forceinline__ i64 part(const Forward &f) const {
      const Item &item = shared_state().item;
      return item.split * f.in.rows() + f.in.row_index(item.b, item.h, row);
    }
    __device__ __forceinline__ float *out(const Forward &f) const {
      const Item &item = shared_state().item;
      return f.whole() ? f.a.out.at<float>(item.b, item.h, row, 0) : f.a.partial_out + part(f) * f.in.head_dim_v;
    }
    __device__ __forceinline__ i64 stride(const Forward &f) const { return f.whole() ? f.a.out.stride[3] : 1; }
  };
};

} // namespace strobe::tf32
