// Tiles: in registers, spread over the CTA's threads; in shared memory, staged a chunk at a time; and the three products of attention.
#pragma once
#include "../attention/arguments.h"
#include "config.h"
#include "numbers.h"

namespace strobe::simt {

template <class T, int N> struct alignas(N * sizeof(T)) Pack {
  T x[N];
};
template <class T, int N> __device__ __forceinline__ Pack<T, N> read(const T *p) { return *reinterpret_cast<const Pack<T, N> *>(p); }

// The widest piece, up to 16 bytes, that n elements can be cut into.
template <class T> STROBE_FN constexpr int piece(int n) { return n % 4 == 0 && sizeof(T) <= 4 ? 4 : n % 2 == 0 ? 2 : 1; }

// The threads as a grid of kY x kX. 16-byte reads of shared memory are served in two passes instead of four where neighbouring lanes, or
// lanes two apart, read the same address: so bit 0 of a lane goes to x, bit 1 to y.
template <int kY, int kX> struct Threads {
  static constexpr int kCount = kY * kX;
  static_assert(kX % 4 == 0 && kX <= 16 && kCount % 32 == 0);
  int x, y;
  __device__ Threads() {
    int t = (int)threadIdx.x, lane = t % 32;
    x = (lane & 1) | (lane >> 2 & (kX / 2 - 1)) << 1;
    y = t / 32 * (32 / kX) + ((lane >> 1 & 1) | lane / (2 * kX) << 1);
  }
  // Over the kX threads of equal y, which lie in one warp.
  template <class T, class F> static __device__ __forceinline__ T reduce(T v, F &&f) {
    v = f(v, __shfl_xor_sync(0xffffffffu, v, 1));
#pragma unroll
    for (int mask = 4; mask < 2 * kX; mask *= 2) v = f(v, __shfl_xor_sync(0xffffffffu, v, mask));
    return v;
  }
  // Element i of n that a thread owns along an axis: in turns of one, or of W adjacent ones.
  template <int W = 1> __device__ __forceinline__ int row(int i) const { return W * (y + kY * (i / W)) + i % W; }
  template <int W = 1> __device__ __forceinline__ int column(int j) const { return W * (x + kX * (j / W)) + j % W; }
};

// The loops below are unrolled to a few hundred FMA and no further: more compile for seconds and run no faster.

// acc += A B^T; A: kY*M rows, B: kX*N rows, both with the summed axis adjacent. acc(i, j) belongs to row(i), column(j).
template <int kDepth, int kStride, class Grid, class T, int M, int N>
__device__ __forceinline__ void multiply_nt(const Grid &g, T (&acc)[M][N], const T *a, const T *b) {
  constexpr int V = 16 / sizeof(T);
#pragma unroll 1
  for (int c = 0; c < kDepth; c += V) {
    const auto row = [&](int i) { return read<T, V>(a + g.row(i) * kStride + c); };
    const auto column = [&](int j) { return read<T, V>(b + g.column(j) * kStride + c); };
    const auto add = [&](T &sum, const Pack<T, V> &x, const Pack<T, V> &y, int v) { sum = fma(x.x[v], y.x[v], sum); };
    if constexpr (M <= N) { // the fewer are held, the others pass by
      Pack<T, V> rows[M];
#pragma unroll
      for (int i = 0; i < M; ++i) rows[i] = row(i);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Pack<T, V> y = column(j);
#pragma unroll
        for (int v = 0; v < V; ++v)
#pragma unroll
          for (int i = 0; i < M; ++i) add(acc[i][j], rows[i], y, v);
      }
    } else {
      Pack<T, V> columns[N];
#pragma unroll
      for (int j = 0; j < N; ++j) columns[j] = column(j);
#pragma unroll
      for (int i = 0; i < M; ++i) {
        const Pack<T, V> x = row(i);
#pragma unroll
        for (int v = 0; v < V; ++v)
#pragma unroll
          for (int j = 0; j < N; ++j) add(acc[i][j], x, columns[j], v);
      }
    }
  }
}

// acc += A B; A: kY*M rows with the summed axis adjacent, B: kDepth rows. acc(i, j) belongs to row(i), column<W>(j).
template <int kDepth, int kStrideA, int kStrideB, class Grid, class T, int M, int N>
__device__ __forceinline__ void multiply_nn(const Grid &g, T (&acc)[M][N], const T *a, const T *b) {
  constexpr int V = 16 / sizeof(T), W = piece<T>(N);
#pragma unroll 1
  for (int k = 0; k < kDepth; k += V) {
    Pack<T, V> rows[M];
#pragma unroll
    for (int i = 0; i < M; ++i) rows[i] = read<T, V>(a + g.row(i) * kStrideA + k);
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int j = 0; j < N; j += W) {
        Pack<T, W> columns = read<T, W>(b + (k + v) * kStrideB + g.template column<W>(j));
#pragma unroll
        for (int w = 0; w < W; ++w)
#pragma unroll
          for (int i = 0; i < M; ++i) acc[i][j + w] = fma(rows[i].x[v], columns.x[w], acc[i][j + w]);
      }
  }
}

// acc += A^T B; A and B: kDepth rows. acc(i, j) belongs to row<WM>(i), column<WN>(j).
template <int kDepth, int kStrideA, int kStrideB, class Grid, class T, int M, int N>
__device__ __forceinline__ void multiply_tn(const Grid &g, T (&acc)[M][N], const T *a, const T *b) {
  constexpr int WM = piece<T>(M), WN = piece<T>(N), kUnroll = max(1, 256 / (M * N));
#pragma unroll kUnroll
  for (int k = 0; k < kDepth; ++k) {
    Pack<T, WM> rows[M / WM];
#pragma unroll
    for (int i = 0; i < M / WM; ++i) rows[i] = read<T, WM>(a + k * kStrideA + g.template row<WM>(i * WM));
#pragma unroll
    for (int j = 0; j < N; j += WN) {
      Pack<T, WN> columns = read<T, WN>(b + k * kStrideB + g.template column<WN>(j));
#pragma unroll
      for (int w = 0; w < WN; ++w)
#pragma unroll
        for (int i = 0; i < M; ++i) acc[i][j + w] = fma(rows[i / WM].x[i % WM], columns.x[w], acc[i][j + w]);
    }
  }
}

// The same as multiply_nn or multiply_tn where B is not finite: what A has at 0, hidden or dropped, leaves the sum alone. Slow.
template <bool kTransposed, int kDepth, int kStrideA, int kStrideB, class Grid, class T, int M, int N>
__device__ __forceinline__ void multiply_seen(const Grid &g, T (&acc)[M][N], const T *a, const T *b) {
  constexpr int WM = piece<T>(M), WN = piece<T>(N);
#pragma unroll 1
  for (int k = 0; k < kDepth; ++k) {
    T column[N];
#pragma unroll
    for (int j = 0; j < N; ++j) column[j] = b[k * kStrideB + g.template column<WN>(j)];
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const T x = kTransposed ? a[k * kStrideA + g.template row<WM>(i)] : a[g.row(i) * kStrideA + k];
      if (x == T(0)) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) acc[i][j] = fma(x, column[j], acc[i][j]);
    }
  }
}

// The rows of one head of one sequence in global memory.
template <class E> struct Rows {
  const E *data;
  i64 stride, column_stride;
  i32 count, columns; // beyond them everything reads as 0

  // first: the sequence's first row
  __device__ Rows(const Operand &o, i64 b, i64 h, i64 first, i32 count, i32 columns)
      : data(o.at<const E>(b, h, first, 0)), stride(o.stride[2]), column_stride(o.stride[3]), count(count), columns(columns) {}
};

// kRows x kColumns elements on their way from global to shared memory, in the registers of the CTA's threads.
template <class E, class T, int kThreads, bool kAligned, int kRows, int kColumns> class Chunk {
  static constexpr int V = 16 / sizeof(T), kPieces = kRows * kColumns / V, kMine = (kPieces + kThreads - 1) / kThreads;
  static_assert(kColumns % V == 0);
  Pack<E, V> x_[kMine];

public:
  __device__ __forceinline__ void load(const Rows<E> &from, i32 row, i32 column) {
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      int p = n * kThreads + (int)threadIdx.x, r = row + p / (kColumns / V), c = column + p % (kColumns / V) * V;
#pragma unroll
      for (int v = 0; v < V; ++v) x_[n].x[v] = E{};
      if ((kPieces % kThreads == 0 || p < kPieces) && r < from.count && c < from.columns) {
        const E *at = from.data + r * from.stride;
        if constexpr (kAligned) {
          x_[n] = read<E, V>(at + c);
        } else {
#pragma unroll
          for (int v = 0; v < V; ++v)
            if (c + v < from.columns) x_[n].x[v] = at[(c + v) * from.column_stride];
        }
      }
    }
  }
  // Returns whether all of it is finite.
  template <int kStride> __device__ __forceinline__ bool store(T *shared) const {
    T zero = T(0);
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      int p = n * kThreads + (int)threadIdx.x;
      Pack<T, V> y;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        y.x[v] = to_real<T>(x_[n].x[v]);
        zero = fma(y.x[v], T(0), zero);
      }
      if (kPieces % kThreads == 0 || p < kPieces)
        *reinterpret_cast<Pack<T, V> *>(shared + p / (kColumns / V) * kStride + p % (kColumns / V) * V) = y;
    }
    return zero == T(0);
  }
};

// The products with their operands taken from global memory through two stages of shared memory: while one is multiplied, the next chunk is
// on its way through registers, and one barrier a chunk keeps them apart.
template <Config C> struct Products {
  using E = typename Element<C.dtype>::type;
  using T = typename Element<C.dtype>::real;
  using Grid = Threads<C.threads_q, C.threads_k>;
  static constexpr int kThreads = Grid::kCount, kChunk = C.chunk, kStride = C.chunk_stride();
  template <int kRows, int kColumns> using Part = Chunk<E, T, kThreads, C.aligned != 0, kRows, kColumns>;

  Grid grid;
  T *stages;
  int turn = 0;

  __device__ explicit Products(T *stages) : stages(stages) {}

  __device__ __forceinline__ T *next_stage() { return stages + (turn ^= 1) * C.stage_elements(); }

  // acc += A B^T for the rows a0... of A and b0... of B, over kDim columns.
  template <int kDim, int M, int N> __device__ __forceinline__ void nt(T (&acc)[M][N], const Rows<E> &A, i32 a0, const Rows<E> &B, i32 b0) {
    Part<C.threads_q * M, kChunk> a;
    Part<C.threads_k * N, kChunk> b;
    a.load(A, a0, 0), b.load(B, b0, 0);
#pragma unroll 1
    for (int c = 0; c < kDim; c += kChunk) {
      T *sa = next_stage(), *sb = sa + C.threads_q * M * kStride;
      a.template store<kStride>(sa), b.template store<kStride>(sb);
      __syncthreads();
      if (c + kChunk < kDim) a.load(A, a0, c + kChunk), b.load(B, b0, c + kChunk);
      multiply_nt<kChunk, kStride>(grid, acc, sa, sb);
    }
  }

  // acc += P B for the `length` rows b0... of B and kDim columns from `column` on; P in shared memory.
  template <int kDim, int M, int N>
  __device__ __forceinline__ void nn(T (&acc)[M][N], const T *p, const Rows<E> &B, i32 b0, i32 length, i32 column = 0) {
    by_rows<false, C.rows_staged(C.tile_k, kDim), kDim>(acc, p, B, b0, length, column);
  }
  // acc += P^T B for the `length` rows b0... of B, of kDim columns; P in shared memory.
  template <int kDim, int M, int N> __device__ __forceinline__ void tn(T (&acc)[M][N], const T *p, const Rows<E> &B, i32 b0, i32 length) {
    by_rows<true, C.rows_staged(C.tile_q, kDim), kDim>(acc, p, B, b0, length, 0);
  }

private:
  template <bool kTransposed, int kRows, int kDim, int M, int N>
  __device__ __forceinline__ void by_rows(T (&acc)[M][N], const T *p, const Rows<E> &B, i32 b0, i32 length, i32 column) {
    Part<kRows, kDim> b;
    b.load(B, b0, column);
#pragma unroll 1
    for (int k = 0; k < length; k += kRows) {
      T *sb = next_stage();
      const bool finite = b.template store<kDim>(sb);
      const bool careful = __syncthreads_or(!finite);
      if (k + kRows < length) b.load(B, b0 + k + kRows, column);
      const T *pk = p + (kTransposed ? k * C.p_stride() : k);
      if (careful)
        multiply_seen<kTransposed, kRows, C.p_stride(), kDim>(grid, acc, pk, sb);
      else if constexpr (kTransposed)
        multiply_tn<kRows, C.p_stride(), kDim>(grid, acc, pk, sb);
      else
        multiply_nn<kRows, C.p_stride(), kDim>(grid, acc, pk, sb);
    }
  }
};

} // namespace strobe::simt
