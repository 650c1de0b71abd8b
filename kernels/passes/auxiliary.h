// max_logit (the largest score of each head) and column_sums (the sums of P's columns), by passes over S after the forward, whose LSE they
// read. A thread block owns a tile of keys of one query head and walks over the queries that see some of it, so the sum of a column has one
// order and needs no workspace. Each block stores its own largest score, and a last launch takes the largest of each head. The scores
// computed here may differ in their last bits from those of the forward's engine, which would show in P. So a first launch adds up P over
// each row as it is computed here, and P is divided by that sum.
#pragma once
#include "../attention/schedule.h"
#include "../device/keys.h"
#include "../device/query_tiles.h"
#include "../device/scores.h"
#include "../tile/copy.h"
#include "../tile/multiply.h"
#include "auxiliary_config.h"

namespace strobe::passes {

// The larger of two numbers; a NaN counts as larger than all numbers.
template <class T> __device__ __forceinline__ T larger(T a, T b) { return b > a || b != b ? b : a; }

// The largest number of all threads; `shared` has room for one number per thread.
template <int kThreads, class T> __device__ __forceinline__ T largest_of_block(T *shared, T mine) {
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int n = kThreads / 2; n; n /= 2) {
    if ((int)threadIdx.x < n) shared[threadIdx.x] = larger(shared[threadIdx.x], shared[threadIdx.x + n]);
    __syncthreads();
  }
  return shared[0];
}

// Raw q.k of a tile by FMA. This thread computes it for the keys key(m), m < kKeys, and the queries query(n), n < kQueries. Taken: the type
// of the rows that stay while the other operand's rows stream by.
template <AuxiliaryConfig C, class Taken> struct FmaTile {
  using E = typename Element<C.dtype>::type;
  using T = typename Element<C.dtype>::real;
  static constexpr int kKeys = C.tile_k / C.kThreadsK, kQueries = C.tile_q / C.kThreadsQ, kThreads = C.threads();
  T S[kKeys][kQueries];

  __device__ __forceinline__ FmaTile(unsigned char *shared, const Inputs &in) : in(in), K((T *)shared), Q(K + C.kColumns * kPitchK) {}
  static __device__ __forceinline__ int share() { return (int)threadIdx.x / C.kThreadsK; }
  static __device__ __forceinline__ i32 key(int m) { return (i32)threadIdx.x % C.kThreadsK + C.kThreadsK * m; }
  static __device__ __forceinline__ i32 query(int n) { return share() + C.kThreadsQ * n; }
  __device__ __forceinline__ T raw(int m, int n) const { return S[m][n]; }

  __device__ __forceinline__ void take_keys(const Taken &rows) { keys = rows; }
  __device__ __forceinline__ void finish() const {}
  template <class Rows> __device__ __forceinline__ void multiply(const Rows &queries) {
#pragma unroll
    for (int m = 0; m < kKeys; ++m)
#pragma unroll
      for (int n = 0; n < kQueries; ++n) S[m][n] = T(0);
    for (i32 c0 = 0; c0 < in.head_dim; c0 += C.kColumns) { // q.k is summed in runs of columns
      __syncthreads();
      stage<C.tile_k, kPitchK>(K, keys, c0);
      stage<C.tile_q, kPitchQ>(Q, queries, c0);
      __syncthreads();
      T run[kKeys][kQueries] = {};
#pragma unroll 4
      for (int c = 0; c < C.kColumns; ++c) {
        T k[kKeys], q[kQueries];
#pragma unroll
        for (int m = 0; m < kKeys; ++m) k[m] = K[c * kPitchK + key(m)];
#pragma unroll
        for (int n = 0; n < kQueries; ++n) q[n] = Q[c * kPitchQ + query(n)];
#pragma unroll
        for (int m = 0; m < kKeys; ++m)
#pragma unroll
          for (int n = 0; n < kQueries; ++n) run[m][n] = fma(k[m], q[n], run[m][n]);
      }
#pragma unroll
      for (int m = 0; m < kKeys; ++m)
#pragma unroll
        for (int n = 0; n < kQueries; ++n) S[m][n] += run[m][n];
    }
  }

private:
  static constexpr int kPitchK = C.pitch(C.tile_k), kPitchQ = C.pitch(C.tile_q);
  const Inputs &in;
  T *const K, *const Q; // (column, row)
  Taken keys;

  template <int kRows, int kPitch, class From> __device__ __forceinline__ void stage(T *to, const From &from, i32 c0) const {
    for (int i = (int)threadIdx.x; i < kRows * C.kColumns; i += kThreads) {
      const int r = i / C.kColumns, c = i % C.kColumns;
      T x = T(0);
      if (r < from.rows && c0 + c < from.columns) {
        if constexpr (requires { from.number(r, c); })
          x = from.number(r, c0 + c);
        else
          x = to_real<T>(from.row(r)[(c0 + c) * from.column_stride]);
      }
      to[c * kPitch + r] = x;
    }
  }
};

// Raw q.k of a tile by tensor cores. A warp has 16 keys, which stay in shared memory, and all queries of the tile.
template <AuxiliaryConfig C> struct TensorTile {
  using E = typename Element<C.dtype>::type;
  using T = float;
  static constexpr int kKeys = 2, kBlocks = C.tile_q / 16, kQueries = 4 * kBlocks, kThreads = C.threads();
  tile::Accumulator S[1][kBlocks];

  __device__ __forceinline__ TensorTile(unsigned char *shared, const Inputs &) : shared(shared_address(shared)) {}
  static __device__ __forceinline__ int warp() { return (int)threadIdx.x / 32; }
  static __device__ __forceinline__ int share() { return (int)threadIdx.x % 4; }
  static __device__ __forceinline__ i32 key(int m) { return 16 * warp() + tile::lane_row(m); }
  static __device__ __forceinline__ i32 query(int n) { return 16 * (n / 4) + tile::lane_column(n / 2 % 2, n % 2); }
  __device__ __forceinline__ float raw(int m, int n) const { return S[0][n / 4].x[n / 2 % 2][2 * m + n % 2]; }

  template <class KeyRows> __device__ __forceinline__ void take_keys(const KeyRows &rows) const {
    tile::load<C.tile_k, C.head_dim, kThreads, C.aligned != 0>(shared, rows, (int)threadIdx.x);
  }
  // Waits for the copies of the keys even if no query has multiplied them: the caller writes to the same memory next.
  __device__ __forceinline__ void finish() const {
    cp_async_commit();
    cp_async_wait<0>();
  }
  template <class Rows> __device__ __forceinline__ void multiply(const Rows &queries) {
    __syncthreads(); // all threads have read the previous queries
    tile::load<C.tile_q, C.head_dim, kThreads, C.aligned != 0>(shared + C.k_bytes(), queries, (int)threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) S[0][n] = {};
    tile::multiply<E, C.head_dim, false>(S, shared + warp() * 16 * (u32)sizeof(E) * C.head_dim, shared + C.k_bytes());
  }

private:
  const u32 shared;
};

template <AuxiliaryConfig C, class Taken, bool kTensorCores = C.tensor_cores != 0> struct TileOf {
  using type = FmaTile<C, Taken>;
};
template <AuxiliaryConfig C, class Taken> struct TileOf<C, Taken, true> {
  using type = TensorTile<C>;
};

// The code that both passes over S share. Taken: the type of the rows that stay while the other operand's rows stream by; the tile calls
// the rows that stay its keys.
template <AuxiliaryConfig C, class Taken> struct ScorePass {
  using Arguments = typename ArgumentsOf<AuxiliaryArguments, C.features.quant != 0>::type;
  using E = typename Element<C.dtype>::type;
  using Tile = typename TileOf<C, Taken>::type;
  using T = typename Tile::T;
  static constexpr Features F = C.features;
  using HeadScores = Scores<F, T, C.dtype == kF16 || C.dtype == kBF16 ? Functions::half : Functions::full>;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  // exp(score * natural - lse). FP32 needs more than its usual precision here: beside a large sink all sums have this function's error.
  static __device__ __forceinline__ T exp_from(T score, T natural, T lse) {
    if constexpr (C.dtype == kF16 || C.dtype == kBF16) return exp2(fma(score, natural, -lse) * kLog2e<T>);
    return probability(score, natural, lse, T(0));
  }
  // The score of key j; -inf if the key is hidden, missing or not before k1.
  template <class KeysOfHead, class Row>
  static __device__ __forceinline__ T score(const HeadScores &scores, const KeysOfHead &keys, T raw, const Row &row, i32 j,
                                            bool by_position, i32 k1) {
    const T x = scores.score(raw, row, j, by_position, k1);
    return F.pages && j < k1 && lacks(keys, j) ? minus_infinity<T>() : x;
  }
  // The sum of a row over all threads: put(), which must follow a barrier, stores each thread's sum, less its rounding error, to shared
  // memory; total() adds these up in order.
  static __device__ __forceinline__ void put(T *parts, const T (&sum)[Tile::kKeys], const T (&lost)[Tile::kKeys]) {
#pragma unroll
    for (int m = 0; m < Tile::kKeys; ++m) parts[Tile::share() * C.tile_k + Tile::key(m)] = sum[m] - lost[m];
    __syncthreads();
  }
  static __device__ __forceinline__ T total(const T *parts, i32 i) {
    T all = T(0);
#pragma unroll
    for (int n = 0; n < C.shares(); ++n) all += parts[n * C.tile_k + i];
    return all;
  }
};

// Computes for each query 1 / (the sum of exp(s - LSE) over the keys that it sees, plus its sink's term). Here queries take the place of
// the tile's keys, and keys that of its queries.
template <AuxiliaryConfig C> struct RowTotals : ScorePass<C, tile::Matrix<const typename Element<C.dtype>::type>> {
  using Queries = tile::Matrix<const typename Element<C.dtype>::type>;
  using Pass = ScorePass<C, Queries>;
  using Pass::F, Pass::kThreads;
  using typename Pass::Arguments, typename Pass::E, typename Pass::Tile, typename Pass::T, typename Pass::HeadScores;
  static constexpr int kQueries = Tile::kKeys, kKeys = Tile::kQueries;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    const u32 tiles = (u32)div_up(in.seqlen_q, C.tile_k), pair = blockIdx.x / tiles;
    const i32 q0 = (i32)(blockIdx.x % tiles) * C.tile_k, h = (i32)(pair % in.heads), b = (i32)(pair / in.heads);
    const Sequence s = in.sequence<F>(b);
    const i32 q1 = (i32)min((i64)q0 + C.tile_k, s.band.seqlen_q);
    if (q0 >= q1) return;

    Tile tile(shared, in);
    tile.take_keys(Queries{in.q.at<const E>(b, h, s.q0 + q0, 0), in.q.stride[2], in.q.stride[3], q1 - q0, in.head_dim});
    const HeadScores scores(in, s, b);
    const T natural = natural_factor<F>(scores.scale);
    const auto K = k_of_call<E, F>(a, s, b, h / in.group);
    T sum[kQueries], lost[kQueries], lse[kQueries];
#pragma unroll
    for (int m = 0; m < kQueries; ++m) {
      sum[m] = lost[m] = T(0);
      lse[m] = *a.lse.template at<const T>(b, h, s.q0 + min(q0 + tile.key(m), q1 - 1), 0);
    }
    Schedule schedule(s.band, q0, q1, C.tile_q, 16, F.blocks ? in.blocks.row(b, h, q0 / in.blocks.row_tokens) : BlockRow{});
    for (KeyTile keys; schedule.next(keys);) {
      const i32 k0 = (i32)keys.begin, k1 = (i32)keys.end;
      tile.multiply(K.rows(k0, k1));
      const bool by_position = keys.masked || k1 - k0 < C.tile_q;
#pragma unroll
      for (int m = 0; m < kQueries; ++m) {
        const auto row = scores.row(q0 + tile.key(m), h);
        T part = T(0);
#pragma unroll
        for (int n = 0; n < kKeys; ++n) {
          const T x = Pass::score(scores, K, tile.raw(m, n), row, k0 + tile.query(n), by_position, k1);
          if (x != minus_infinity<T>()) part += Pass::exp_from(x, natural, lse[m]);
        }
        strobe::add(sum[m], lost[m], part);
      }
    }
    tile.finish();
    __syncthreads();
    T *const parts = (T *)shared;
    Pass::put(parts, sum, lost);
    for (i32 i = (i32)threadIdx.x; i < q1 - q0; i += kThreads) {
      T all = Pass::total(parts, i);
      if (in.sinks)
        all += Pass::exp_from(*in.sinks.template at<const T>(0, h, 0, 0), T(1), *a.lse.template at<const T>(b, h, s.q0 + q0 + i, 0));
      // A row that sees no key, or whose sum is not finite, is not divided.
      ((T *)a.inverse)[in.row_index(b, h, s.q0 + q0 + i)] = all > T(0) && all < -minus_infinity<T>() ? T(1) / all : T(1);
    }
  }
};

template <AuxiliaryConfig C> struct Auxiliary : ScorePass<C, typename KeysOf<typename Element<C.dtype>::type, C.features>::type::Matrix> {
  using Pass = ScorePass<C, typename KeysOf<typename Element<C.dtype>::type, C.features>::type::Matrix>;
  using Pass::F, Pass::kThreads;
  using typename Pass::Arguments, typename Pass::E, typename Pass::Tile, typename Pass::T, typename Pass::HeadScores;
  static constexpr int kKeys = Tile::kKeys, kQueries = Tile::kQueries;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    const u32 tiles = (u32)div_up(in.seqlen_k, C.tile_k), pair = blockIdx.x / tiles;
    const i32 number = (i32)(blockIdx.x % tiles), h = (i32)(pair % in.heads), b = (i32)(pair / in.heads);
    if (!F.pages && a.column_sums && in.cu_seqlens_q) clear_behind(a, b, h, number, (i32)tiles);
    if (b >= in.batch) return; // there is no sequence, and all tokens are padding

    const Sequence s = in.sequence<F>(b);
    const i32 k0 = number * C.tile_k, k1 = (i32)min((i64)k0 + C.tile_k, s.band.seqlen_k);
    T sum[kKeys], lost[kKeys], most = minus_infinity<T>(); // lost: the rounding errors of sum (Kahan)
#pragma unroll
    for (int m = 0; m < kKeys; ++m) sum[m] = lost[m] = T(0);
    if (k0 < k1) {
      Tile tile(shared, in);
      const auto keys = k_of_call<E, F>(a, s, b, h / in.group);
      tile.take_keys(keys.rows(k0, k1));
      const HeadScores scores(in, s, b);
      QueryTiles<false, C.tile_q> queries(s.band, k0, k1, C.tile_k, {nullptr, 0, 0});
      for (QueryTile q; queries.next(q);) {
        if constexpr (F.blocks) {
          if (!in.blocks.row(b, h, q.begin / in.blocks.row_tokens).keeps(k0)) continue;
        }
        const i32 rows = (i32)min((i64)C.tile_q, s.band.seqlen_q - q.begin);
        tile.multiply(tile::Matrix<const E>{in.q.at<const E>(b, h, s.q0 + q.begin, 0), in.q.stride[2], in.q.stride[3], rows, in.head_dim});
        if (q.masked)
          add<true>(a, tile, keys, scores, s, b, h, q.begin, rows, k0, k1, sum, lost, most);
        else
          add<false>(a, tile, keys, scores, s, b, h, q.begin, rows, k0, k1, sum, lost, most);
      }
      tile.finish();
    }
    __syncthreads();
    if constexpr (C.column_sums != 0) store_sums(a, (T *)shared, sum, lost, b, h, s, k0, k1);
    if (a.largest) store_largest(a, (T *)shared + C.shares() * C.tile_k, most);
  }

private:
  template <bool kMasked, class KeysOfHead>
  static __device__ __forceinline__ void add(const Arguments &a, const Tile &tile, const KeysOfHead &keys, const HeadScores &scores,
                                             const Sequence &s, i32 b, i32 h, i32 q0, i32 rows, i32 k0, i32 k1, T (&sum)[kKeys],
                                             T (&lost)[kKeys], T &most) {
    const Inputs &in = a.in;
    const T natural = natural_factor<F>(scores.scale);
    T part[kKeys];
#pragma unroll
    for (int m = 0; m < kKeys; ++m) part[m] = T(0);
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      const i32 i = tile.query(n);
      if (i >= rows) continue;
      const auto row = scores.row(q0 + i, h);
      T lse = T(0), inverse = T(0);
      if constexpr (C.column_sums != 0) {
        lse = *a.lse.template at<const T>(b, h, s.q0 + q0 + i, 0);
        inverse = ((const T *)a.inverse)[in.row_index(b, h, s.q0 + q0 + i)];
      }
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
        const T x = Pass::score(scores, keys, tile.raw(m, n), row, k0 + tile.key(m), kMasked, k1);
        most = larger(most, x);
        if constexpr (C.column_sums != 0) {
          if (x != minus_infinity<T>()) part[m] += Pass::exp_from(x, natural, lse) * inverse; // LSE may be NaN for a hidden element
        }
      }
    }
    if constexpr (C.column_sums != 0) {
#pragma unroll
      for (int m = 0; m < kKeys; ++m) strobe::add(sum[m], lost[m], part[m]);
    }
  }

  // Adds up the sums of the threads that share a key, in order, and stores the result: 0 for keys that do not count.
  static __device__ __forceinline__ void store_sums(const Arguments &a, T *parts, const T (&sum)[kKeys], const T (&lost)[kKeys], i32 b,
                                                    i32 h, const Sequence &s, i32 k0, i32 k1) {
    Pass::put(parts, sum, lost);
    const i64 held = F.pages ? a.in.seqlen_k : a.in.held(b).seqlen_k;
    for (i32 j = (i32)threadIdx.x; j < C.tile_k && k0 + j < held; j += kThreads) {
      const T all = Pass::total(parts, j);
      *a.column_sums.template at<T>(b, h, s.k0 + k0 + j, 0) = k0 + j < k1 ? all : T(0);
    }
  }
  static __device__ __forceinline__ void store_largest(const Arguments &a, T *largest, T most) {
    most = largest_of_block<kThreads>(largest, most);
    if (threadIdx.x == 0) ((T *)a.largest)[blockIdx.x] = most * natural_factor<F>(T(a.in.scale));
  }
  // Stores 0 for the tokens between the keys of this sequence and those of the next, which belong to no sequence; if there is no sequence,
  // for all tokens.
  static __device__ __forceinline__ void clear_behind(const Arguments &a, i32 b, i32 h, i32 number, i32 tiles) {
    const Inputs &in = a.in;
    i64 begin = 0, end = in.total_k;
    if (b < in.batch) {
      const HeldRows s = in.held(b);
      begin = s.k0 + s.seqlen_k;
      if (b + 1 < in.batch) end = in.held(b + 1).k0;
    }
    const i64 first = begin + number * kThreads + (i32)threadIdx.x, step = (i64)tiles * kThreads;
    for (i64 j = first; j < end; j += step) *a.column_sums.template at<T>(0, h, j, 0) = T(0);
  }
};

// Takes the largest of a head's tiles' largest scores; one thread block per head.
template <LargestConfig C> struct LargestScore {
  using Arguments = AuxiliaryArguments;
  using T = typename Element<C.dtype>::real;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    __shared__ T largest[kThreads];
    const T *const of_tiles = (const T *)a.largest + (i64)blockIdx.x * a.tiles;
    T most = minus_infinity<T>();
    for (i32 n = (i32)threadIdx.x; n < a.tiles; n += kThreads) most = larger(most, of_tiles[n]);
    most = largest_of_block<kThreads>(largest, most);
    if (threadIdx.x == 0) *a.max_logit.template at<T>((i32)blockIdx.x / a.in.heads, (i32)blockIdx.x % a.in.heads, 0, 0) = most;
  }
};

} // namespace strobe::passes
