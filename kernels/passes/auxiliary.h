// The largest score of each head, and the sums of P's columns: a pass over S after the forward, whose LSE it reads. A block of threads owns
// a tile of keys of one query head and walks over the queries that see some of it, so a column's sum has one order and needs no workspace;
// of the largest scores each block leaves its own, and a second launch takes the largest of a head.
#pragma once
#include "../device/keys.h"
#include "../device/query_tiles.h"
#include "../device/scores.h"
#include "../tile/copy.h"
#include "../tile/multiply.h"
#include "auxiliary_config.h"

namespace strobe::passes {

// The larger; a NaN is larger than all numbers.
template <class T> __device__ __forceinline__ T larger(T a, T b) { return b > a || b != b ? b : a; }

// Of what all threads have; `shared` has room for a number of each.
template <int kThreads, class T> __device__ __forceinline__ T largest_of_block(T *shared, T mine) {
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int n = kThreads / 2; n; n /= 2) {
    if ((int)threadIdx.x < n) shared[threadIdx.x] = larger(shared[threadIdx.x], shared[threadIdx.x + n]);
    __syncthreads();
  }
  return shared[0];
}

// Raw q.k of a tile by FMA: this thread has the keys key(m), m < kKeys, and the queries query(n), n < kQueries.
template <AuxiliaryConfig C> struct FmaTile {
  using E = typename Element<C.dtype>::type;
  using T = typename Element<C.dtype>::real;
  static constexpr int kKeys = C.tile_k / C.kThreadsK, kQueries = C.tile_q / C.kThreadsQ, kThreads = C.threads();
  T S[kKeys][kQueries];

  __device__ __forceinline__ FmaTile(unsigned char *shared, const Inputs &in) : in(in), K((T *)shared), Q(K + C.kColumns * kPitchK) {}
  static __device__ __forceinline__ int share() { return (int)threadIdx.x / C.kThreadsK; }
  static __device__ __forceinline__ i32 key(int m) { return (i32)threadIdx.x % C.kThreadsK + C.kThreadsK * m; }
  static __device__ __forceinline__ i32 query(int n) { return share() + C.kThreadsQ * n; }
  __device__ __forceinline__ T raw(int m, int n) const { return S[m][n]; }

  __device__ __forceinline__ void take_keys(const tile::Matrix<const E> &rows) { keys = rows; }
  __device__ __forceinline__ void finish() const {}
  __device__ __forceinline__ void multiply(const tile::Matrix<const E> &queries) {
#pragma unroll
    for (int m = 0; m < kKeys; ++m)
#pragma unroll
      for (int n = 0; n < kQueries; ++n) S[m][n] = T(0);
    for (i32 c0 = 0; c0 < in.head_dim; c0 += C.kColumns) { // runs of columns, which are then added up
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
  tile::Matrix<const E> keys;

  template <int kRows, int kPitch> __device__ __forceinline__ void stage(T *to, const tile::Matrix<const E> &from, i32 c0) const {
    for (int i = (int)threadIdx.x; i < kRows * C.kColumns; i += kThreads) {
      const int r = i / C.kColumns, c = i % C.kColumns;
      to[c * kPitch + r] = r < from.rows && c0 + c < from.columns ? to_real<T>(from.row(r)[(c0 + c) * from.column_stride]) : T(0);
    }
  }
};

// The same on tensor cores: a warp has 16 keys, which stay in shared memory, and all queries.
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

  __device__ __forceinline__ void take_keys(const tile::Matrix<const E> &rows) const {
    tile::load<C.tile_k, C.head_dim, kThreads, C.aligned != 0>(shared, rows, (int)threadIdx.x);
  }
  // Nothing is written where keys still arrive, though no query has multiplied them.
  __device__ __forceinline__ void finish() const {
    cp_async_commit();
    cp_async_wait<0>();
  }
  __device__ __forceinline__ void multiply(const tile::Matrix<const E> &queries) {
    __syncthreads(); // nobody reads the last queries any more
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

template <AuxiliaryConfig C, bool kTensorCores = C.tensor_cores != 0> struct TileOf {
  using type = FmaTile<C>;
};
template <AuxiliaryConfig C> struct TileOf<C, true> {
  using type = TensorTile<C>;
};

template <AuxiliaryConfig C> struct Auxiliary {
  using Arguments = AuxiliaryArguments;
  using Tile = typename TileOf<C>::type;
  using E = typename Element<C.dtype>::type;
  using T = typename Tile::T;
  static constexpr Features F = C.features;
  using HeadScores = Scores<F, T, C.dtype == kF16 || C.dtype == kBF16 ? Functions::half : Functions::full>;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm, kKeys = Tile::kKeys, kQueries = Tile::kQueries;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    const u32 tiles = (u32)div_up(in.seqlen_k, C.tile_k), pair = blockIdx.x / tiles;
    const i32 number = (i32)(blockIdx.x % tiles), h = (i32)(pair % in.heads), b = (i32)(pair / in.heads);
    if (a.column_sums && in.cu_seqlens_q) clear_behind(a, b, h, number, (i32)tiles);
    if (b >= in.batch) return; // there is no sequence, and all tokens are padding

    const Sequence s = in.sequence<F.seqused>(b);
    const i32 k0 = number * C.tile_k, k1 = (i32)min((i64)k0 + C.tile_k, s.band.seqlen_k);
    T sum[kKeys], lost[kKeys], most = minus_infinity<T>(); // lost: what sum's roundings dropped (Kahan)
#pragma unroll
    for (int m = 0; m < kKeys; ++m) sum[m] = lost[m] = T(0);
    if (k0 < k1) {
      Tile tile(shared, in);
      tile.take_keys(k_of<E>(in, s, b, h / in.group).rows(k0, k1));
      const HeadScores scores(in, s, b);
      QueryTiles<false, C.tile_q> queries(s.band, k0, k1, C.tile_k, {nullptr, 0, 0});
      for (QueryTile q; queries.next(q);) {
        if constexpr (F.blocks) {
          if (!in.blocks.row(b, h, q.begin / in.blocks.row_tokens).keeps(k0)) continue;
        }
        const i32 rows = (i32)min((i64)C.tile_q, s.band.seqlen_q - q.begin);
        tile.multiply({in.q.at<const E>(b, h, s.q0 + q.begin, 0), in.q.stride[2], in.q.stride[3], rows, in.head_dim});
        if (q.masked)
          add<true>(a, tile, scores, s, b, h, q.begin, rows, k0, k1, sum, lost, most);
        else
          add<false>(a, tile, scores, s, b, h, q.begin, rows, k0, k1, sum, lost, most);
      }
      tile.finish();
    }
    __syncthreads();
    if constexpr (C.column_sums != 0) store_sums(a, (T *)shared, sum, lost, b, h, s, k0, k1);
    if (a.largest) store_largest(a, (T *)shared + C.shares() * C.tile_k, most);
  }

private:
  template <bool kMasked>
  static __device__ __forceinline__ void add(const Arguments &a, const Tile &tile, const HeadScores &scores, const Sequence &s, i32 b,
                                             i32 h, i32 q0, i32 rows, i32 k0, i32 k1, T (&sum)[kKeys], T (&lost)[kKeys], T &most) {
    const T natural = F.additive() ? T(1) : scores.scale;
    T part[kKeys];
#pragma unroll
    for (int m = 0; m < kKeys; ++m) part[m] = T(0);
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      const i32 i = tile.query(n);
      if (i >= rows) continue;
      const auto row = scores.row(q0 + i, h);
      T lse = T(0);
      if constexpr (C.column_sums != 0) lse = *a.lse.template at<const T>(b, h, s.q0 + q0 + i, 0);
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
        const T x = scores.score(tile.raw(m, n), row, k0 + tile.key(m), kMasked, k1);
        most = larger(most, x);
        if constexpr (C.column_sums != 0) {
          if (x != minus_infinity<T>()) part[m] += exp2(fma(x, natural, -lse) * kLog2e<T>); // of what is hidden LSE may be no number
        }
      }
    }
    if constexpr (C.column_sums != 0) {
#pragma unroll
      for (int m = 0; m < kKeys; ++m) strobe::add(sum[m], lost[m], part[m]);
    }
  }

  // Over the threads that share a key, in order. Keys that do not count have the sum 0.
  static __device__ __forceinline__ void store_sums(const Arguments &a, T *parts, const T (&sum)[kKeys], const T (&lost)[kKeys], i32 b,
                                                    i32 h, const Sequence &s, i32 k0, i32 k1) {
#pragma unroll
    for (int m = 0; m < kKeys; ++m) parts[Tile::share() * C.tile_k + Tile::key(m)] = sum[m] - lost[m];
    __syncthreads();
    const i64 held = a.in.held(b).seqlen_k;
    for (i32 j = (i32)threadIdx.x; j < C.tile_k && k0 + j < held; j += kThreads) {
      T all = T(0);
#pragma unroll
      for (int n = 0; n < C.shares(); ++n) all += parts[n * C.tile_k + j];
      *a.column_sums.template at<T>(b, h, s.k0 + k0 + j, 0) = k0 + j < k1 ? all : T(0);
    }
  }
  static __device__ __forceinline__ void store_largest(const Arguments &a, T *largest, T most) {
    most = largest_of_block<kThreads>(largest, most);
    if (threadIdx.x == 0) ((T *)a.largest)[blockIdx.x] = F.additive() ? most : most * T(a.in.scale);
  }
  // Tokens between the keys of this sequence and those of the next belong to none; without any sequence all do.
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

// Of a head: a block of threads takes the largest scores of its tiles.
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
