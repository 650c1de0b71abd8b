// Tiles in registers, spread over the CTA's threads; tiles in shared memory, staged a chunk at a time; and the three products of attention.
#pragma once
#include "../attention/arguments.h"
#include "../device/keys.h"
#include "../device/part_tiles.h"
#include "config.h"
#include "numbers.h"

namespace strobe::simt {

template <class T, int N> struct alignas(N * sizeof(T)) Pack {
  T x[N];
};
template <class T, int N> __device__ __forceinline__ Pack<T, N> read(const T *p) { return *reinterpret_cast<const Pack<T, N> *>(p); }

// The widest piece, of up to 16 bytes, that divides n elements evenly.
template <class T> STROBE_FN constexpr int piece(int n) { return n % 4 == 0 && sizeof(T) <= 4 ? 4 : n % 2 == 0 ? 2 : 1; }

template <class T, int N> STROBE_FN constexpr int size(const T (&)[N]) { return N; }

// The threads as a grid of kY x kX. 16-byte reads of shared memory take two passes instead of four if neighbouring lanes, or lanes two
// apart, read the same address. So bit 0 of a lane goes to x, bit 1 to y.
template <int kY, int kX> struct Threads {
  static constexpr int kRows = kY, kColumns = kX, kCount = kY * kX;
  static_assert(kX % 4 == 0 && kX <= 16 && kCount % 32 == 0);
  int x, y;
  __device__ Threads() {
    int t = (int)threadIdx.x, lane = t % 32;
    x = (lane & 1) | (lane >> 2 & (kX / 2 - 1)) << 1;
    y = t / 32 * (32 / kX) + ((lane >> 1 & 1) | lane / (2 * kX) << 1);
  }
  // Reductions over the kX threads of equal y, which lie in one warp.
  template <class T, class F> static __device__ __forceinline__ T reduce(T v, F &&f) {
    v = f(v, __shfl_xor_sync(0xffffffffu, v, 1));
#pragma unroll
    for (int mask = 4; mask < 2 * kX; mask *= 2) v = f(v, __shfl_xor_sync(0xffffffffu, v, mask));
    return v;
  }
  // The i-th of the n elements that a thread owns along an axis. The threads take one element each in rotation, or W adjacent ones.
  template <int W = 1> __device__ __forceinline__ int row(int i) const { return W * (y + kY * (i / W)) + i % W; }
  template <int W = 1> __device__ __forceinline__ int column(int j) const { return W * (x + kX * (j / W)) + j % W; }
};

// The following loops are unrolled to a few hundred FMA. Unrolled further, they compile for seconds and run no faster.

// The place of row r in a line of a transposed chunk (Chunk::store_transposed), chosen so that threads which write adjacent columns use
// different banks. kSpan: how many adjacent rows the threads own, a power of two. Rows are permuted only among kSpan rows.
template <int kSpan, class T> STROBE_FN constexpr int swizzled(int r, int line) {
  return r ^ (8 * (line / (16 / (int)sizeof(T)) % 4) & (kSpan - 1));
}

// acc += A^T B, where A and B are kDepth lines of kY*M and kX*N elements. acc(i, j) belongs to row<WM>(i), column<WN>(j). This is the
// fastest form measured: 53 of 65 TFLOP/s on an H200. Forms that finish one piece of the sum after another reach 43 to 48.
template <int kDepth, int kStrideA, int kStrideB, bool kSwizzled, class Grid, class T, int M, int N>
__device__ __forceinline__ void multiply(const Grid &g, T (&acc)[M][N], const T *a, const T *b) {
  constexpr int WM = piece<T>(M), WN = piece<T>(N), kUnroll = max(1, 2048 / ((int)sizeof(T) * M * N));
  const int r = g.template row<WM>(0), c = g.template column<WN>(0);
#pragma unroll kUnroll
  for (int k = 0; k < kDepth; ++k, a += kStrideA, b += kStrideB) {
    Pack<T, WM> rows[M / WM];
    const T *ak = a + (kSwizzled ? swizzled<Grid::kRows * WM, T>(r, k) : r),
            *bk = b + (kSwizzled ? swizzled<Grid::kColumns * WN, T>(c, k) : c);
#pragma unroll
    for (int i = 0; i < M / WM; ++i) rows[i] = read<T, WM>(ak + i * WM * Grid::kRows);
#pragma unroll
    for (int j = 0; j < N; j += WN) {
      const Pack<T, WN> columns = read<T, WN>(bk + j * Grid::kColumns);
#pragma unroll
      for (int w = 0; w < WN; ++w)
#pragma unroll
        for (int i = 0; i < M; ++i) acc[i][j + w] = fma(rows[i / WM].x[i % WM], columns.x[w], acc[i][j + w]);
    }
  }
}

// acc += A^T B for a B that is not finite. An element of A that is 0, because it is hidden or dropped, adds nothing. Slow.
template <int kDepth, int kStrideA, int kStrideB, class Grid, class T, int M, int N>
__device__ __forceinline__ void multiply_seen(const Grid &g, T (&acc)[M][N], const T *a, const T *b) {
  constexpr int WM = piece<T>(M), WN = piece<T>(N);
#pragma unroll 1
  for (int k = 0; k < kDepth; ++k) {
    T column[N];
#pragma unroll
    for (int j = 0; j < N; ++j) column[j] = b[k * kStrideB + g.template column<WN>(j)];
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const T x = a[k * kStrideA + g.template row<WM>(i)];
      if (x == T(0)) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) acc[i][j] = fma(x, column[j], acc[i][j]);
    }
  }
}

// The first row that exists: 0, except where a tile may begin before a part's range.
template <bool kBounded> struct FirstRow {
  static __device__ constexpr bool may_lack() { return false; }
  static __device__ __forceinline__ i32 from() { return 0; }
};
template <> struct FirstRow<true> {
  static __device__ constexpr bool may_lack() { return true; }
  i32 first = 0;
  __device__ __forceinline__ i32 from() const { return first; }
};

// The rows of one head of one sequence in global memory.
template <class E, bool kBounded = false> struct Rows : FirstRow<kBounded> {
  using Of = E;
  static constexpr bool kInPages = false;
  const E *data;
  i64 stride, column_stride;
  i32 count, columns; // elements beyond count and columns read as 0

  __device__ Rows(const Keys<E> &keys, i32 count)
      : data(keys.first), stride(keys.x.stride[2]), column_stride(keys.x.stride[3]), count(count), columns(keys.columns) {}
  Rows() = default;
  // These rows, counted from row `shift` on; only rows before `end` exist.
  __device__ __forceinline__ Rows shifted(i32 shift, i32 end) const {
    Rows rows = *this;
    rows.data += shift * stride, rows.count = end;
    return rows;
  }
  // first: the sequence's first row
  __device__ Rows(const Operand &o, i64 b, i64 h, i64 first, i32 count, i32 columns)
      : data(o.at<const E>(b, h, first, 0)), stride(o.stride[2]), column_stride(o.stride[3]), count(count), columns(columns) {}
};

// y = f(y, x) for one row y in global memory and the thread's elements x of that row. reads: whether y is read; otherwise f gets 0.
// columns: how many columns exist.
template <i32 kCopy, class E, class Grid, class X, int N, class F>
__device__ __forceinline__ void update_row(const Grid &g, E *row, i64 column_stride, i32 columns, X (&x)[N], bool reads, F &&f) {
  constexpr int W = piece<X>(N);
#pragma unroll
  for (int j = 0; j < N; j += W) {
    const i32 c = g.template column<W>(j);
    if constexpr (kCopy != kElements) {
      if (c >= columns) continue;
      Pack<E, W> y{};
      if (reads) y = read<E, W>(row + c);
#pragma unroll
      for (int w = 0; w < W; ++w) y.x[w] = f(y.x[w], x[j + w]);
      *reinterpret_cast<Pack<E, W> *>(row + c) = y;
    } else {
#pragma unroll
      for (int w = 0; w < W; ++w)
        if (c + w < columns) {
          E &y = row[(c + w) * column_stride];
          y = f(reads ? y : E{}, x[j + w]);
        }
    }
  }
}

// Stores a thread's elements of one row, scaled, to global memory. add: adds them to the row in memory.
template <i32 kCopy, class E, class Grid, class T, int N>
__device__ __forceinline__ void store_row(const Grid &g, E *row, i64 column_stride, i32 columns, const T (&x)[N], T scale,
                                          bool add = false) {
  update_row<kCopy>(g, row, column_stride, columns, x, add,
                    [&](E y, T x) { return Convert<E>::from(add ? fma(x, scale, to_real<T>(y)) : x * scale); });
}

// kRows x kColumns elements in flight from global to shared memory, in the registers of the CTA's threads. Each thread takes pieces of V
// elements from a few rows, always at the same columns, so that one address and one comparison per row serve all its pieces. Columns that
// do not exist read as 0. Rows that do not exist read as 0 or as an earlier row: they are multiplied by 0, or their scores are hidden.
template <class Source, class T, int kThreads, i32 kCopy, int kRows, int kColumns> class Chunk : FirstRow<Source::may_lack()> {
protected:
  Chunk() = default;
  using E = typename Source::Of;
  static constexpr int V = 16 / sizeof(T), kAcrossAll = kColumns / V; // pieces per row
  static_assert(kColumns % V == 0);
  static constexpr int kAcross = min(kAcrossAll & -kAcrossAll, kThreads), kDown = kThreads / kAcross;
  static constexpr int kMine = (kRows + kDown - 1) / kDown, kMineAcross = kAcrossAll / kAcross;

  Pack<E, V> x_[kMine][kMineAcross] = {};
  const E *at_;
  i32 rows_, columns_; // how many rows and columns exist from this thread's first ones on

  static __device__ __forceinline__ i32 row() { return (i32)threadIdx.x / kAcross; }
  static __device__ __forceinline__ i32 column() { return (i32)threadIdx.x % kAcross * V; }
  static __device__ __forceinline__ i64 step(const Source &from) { return kCopy == kElements ? from.column_stride : 1; }
  static __device__ __forceinline__ bool mine(int n) { return kRows % kDown == 0 || row() + n * kDown < kRows; }

public:
  __device__ __forceinline__ Chunk(const Source &from, i32 first_row, i32 first_column) {
    const i32 r = computed_here(first_row + row()),
              c = first_column + column(); // so that addresses of several operands do not wait in registers
    at_ = from.data + r * from.stride + c * step(from);
    rows_ = from.count - r;
    if constexpr (Source::may_lack()) this->first = from.from() - r;
    columns_ = from.columns - c;
  }

  __device__ __forceinline__ void load(const Source &from) {
#pragma unroll
    for (int n = 0; n < kMine; ++n)
#pragma unroll
      for (int m = 0; m < kMineAcross; ++m) {
        if (n * kDown >= rows_ || !mine(n)) continue;
        if (Source::may_lack() && n * kDown < this->from()) {
          x_[n][m] = {};
          continue;
        }
        const E *at = at_ + n * kDown * from.stride + m * kAcross * V * step(from);
        const i32 left = columns_ - m * kAcross * V;
        if constexpr (kCopy == kWhole) {
          x_[n][m] = read<E, V>(at);
        } else if constexpr (kCopy == kPieces) {
          x_[n][m] = left > 0 ? read<E, V>(at) : Pack<E, V>{};
        } else {
#pragma unroll
          for (int v = 0; v < V; ++v) x_[n][m].x[v] = v < left ? at[v * from.column_stride] : E{};
        }
      }
  }
  __device__ __forceinline__ void next_columns(const Source &from) { at_ += kColumns * step(from), columns_ -= kColumns; }
  __device__ __forceinline__ void next_rows(const Source &from) {
    at_ += kRows * from.stride, rows_ -= kRows;
    if constexpr (Source::may_lack()) this->first -= kRows;
  }

  // Stores the chunk transposed: one line per column, with rows swizzled.
  template <int kSpan> __device__ __forceinline__ void store_transposed(T *shared) const {
#pragma unroll
    for (int n = 0; n < kMine; ++n)
#pragma unroll
      for (int m = 0; m < kMineAcross; ++m)
        if (mine(n)) {
          const int line = column() + m * kAcross * V;
          T *at = shared + line * kRows + swizzled<kSpan, T>(row() + n * kDown, line);
#pragma unroll
          for (int v = 0; v < V; ++v) at[v * kRows] = to_real<T>(x_[n][m].x[v]);
        }
  }
  // Stores the chunk. Returns whether all elements are finite.
  template <int kStride> __device__ __forceinline__ bool store(T *shared) const {
    T zero = T(0);
    shared += row() * kStride + column();
#pragma unroll
    for (int n = 0; n < kMine; ++n)
#pragma unroll
      for (int m = 0; m < kMineAcross; ++m) {
        Pack<T, V> y;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          y.x[v] = to_real<T>(x_[n][m].x[v]);
          zero = fma(y.x[v], T(0), zero);
        }
        if (mine(n)) *reinterpret_cast<Pack<T, V> *>(shared + n * kDown * kStride + m * kAcross * V) = y;
      }
    return zero == T(0);
  }
};

// Rows of K or V of a paged sequence. data: row 0 of page 0.
template <class E> struct PagedRows : FirstRow<false> {
  using Of = E;
  static constexpr bool kInPages = true;
  const E *data;
  i64 stride, column_stride, page_stride;
  i32 count, columns;
  SequencePages pages;

  __device__ PagedRows(const Operand &x, const SequencePages &pages, i64 head, i32 count, i32 columns)
      : data(x.at<const E>(0, head, 0, 0)), stride(x.stride[2]), column_stride(x.stride[3]), page_stride(x.stride[0]), count(count),
        columns(columns), pages(pages) {}
};

// A Chunk with an address for each row.
template <class Source, class T, int kThreads, i32 kCopy, int kRows, int kColumns>
class PagedChunk : public Chunk<Source, T, kThreads, kCopy, kRows, kColumns> {
  using Base = Chunk<Source, T, kThreads, kCopy, kRows, kColumns>;
  using Base::V, Base::kDown, Base::kMine, Base::kMineAcross, Base::kAcross;
  using typename Base::E;

  i32 first_row_, first_column_;
  static constexpr i64 kNone = (i64)1 << 63;
  i64 row_at_[kMine]; // offsets of rows from row 0 of page 0; kNone: the row does not exist

  __device__ __forceinline__ void find(const Source &from) {
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const i32 r = first_row_ + n * kDown;
      row_at_[n] = r < from.count && Base::mine(n) ? from.pages.offset(r, from.page_stride, from.stride) : kNone;
    }
  }

public:
  __device__ __forceinline__ PagedChunk(const Source &from, i32 first_row, i32 first_column)
      : Base(from, first_row, first_column), first_row_(first_row + Base::row()), first_column_(first_column + Base::column()) {
    find(from);
  }

  __device__ __forceinline__ void load(const Source &from) {
#pragma unroll
    for (int n = 0; n < kMine; ++n)
#pragma unroll
      for (int m = 0; m < kMineAcross; ++m) {
        const i32 c = first_column_ + m * kAcross * V, left = from.columns - c;
        Pack<E, V> x{};
        if (row_at_[n] != kNone) {
          if constexpr (kCopy != kElements) {
            if (kCopy == kWhole || left > 0) x = read<E, V>(from.data + row_at_[n] + c);
          } else {
#pragma unroll
            for (int v = 0; v < V; ++v)
              if (v < left) x.x[v] = from.data[row_at_[n] + (c + v) * from.column_stride];
          }
        }
        this->x_[n][m] = x;
      }
  }
  __device__ __forceinline__ void next_columns(const Source &) { first_column_ += kColumns; }
  __device__ __forceinline__ void next_rows(const Source &from) {
    first_row_ += kRows;
    find(from);
  }
};

// Rows of quantised K or V.
template <Features F, bool kByColumn> struct QuantisedRows : FirstRow<false> {
  using Of = float;
  static constexpr bool kInPages = false;
  static constexpr i32 kStored = F.quant;
  QuantisedKeys<F, kByColumn> keys;
  SequencePages pages; // empty if the keys are not paged
  i32 count;

  __device__ QuantisedRows(const QuantisedKeys<F, kByColumn> &keys, i32 count) : keys(keys), pages(keys.pages), count(count) {}
};

// A Chunk of quantised numbers, which are multiplied by their scales as they are read.
template <class Source, class T, int kThreads, i32 kCopy, int kRows, int kColumns>
class QuantisedChunk : public Chunk<Source, T, kThreads, kElements, kRows, kColumns> {
  using Base = Chunk<Source, T, kThreads, kElements, kRows, kColumns>;
  using Base::V, Base::kDown, Base::kMine, Base::kMineAcross, Base::kAcross;

  i32 first_row_, first_column_;

public:
  __device__ __forceinline__ QuantisedChunk(const Source &, i32 first_row, i32 first_column)
      : first_row_(first_row + Base::row()), first_column_(first_column + Base::column()) {}

  __device__ __forceinline__ void load(const Source &from) {
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const i32 r = first_row_ + n * kDown;
      const bool there = r < from.count && Base::mine(n);
      const u8 *const row = there ? from.keys.row(r) : nullptr;
      const i64 scales = there ? from.keys.scales_of(r) : 0;
#pragma unroll
      for (int m = 0; m < kMineAcross; ++m)
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const i32 c = first_column_ + m * kAcross * V + v;
          float x = 0;
          if (there && c < from.keys.columns) x = stored_number<Source::kStored>(from.keys.stored(row, c)) * from.keys.scale_of(scales, c);
          this->x_[n][m].x[v] = x;
        }
    }
  }
  __device__ __forceinline__ void next_columns(const Source &) { first_column_ += kColumns; }
  __device__ __forceinline__ void next_rows(const Source &) { first_row_ += kRows; }
};

// The chunk type of a source.
template <class Source, class T, int kThreads, i32 kCopy, int kRows, int kColumns> struct ChunkOf {
  using type = typename Either<Source::kInPages, PagedChunk<Source, T, kThreads, kCopy, kRows, kColumns>,
                               Chunk<Source, T, kThreads, kCopy, kRows, kColumns>>::type;
};
template <Features F, bool kByColumn, class T, int kThreads, i32 kCopy, int kRows, int kColumns>
struct ChunkOf<QuantisedRows<F, kByColumn>, T, kThreads, kCopy, kRows, kColumns> {
  using type = QuantisedChunk<QuantisedRows<F, kByColumn>, T, kThreads, kCopy, kRows, kColumns>;
};

// The products. Their operands come from global memory through two stages of shared memory: while one chunk is multiplied, the next one is
// in flight through registers. One barrier per chunk separates them.
template <Config C> struct Products {
  using E = typename Element<C.dtype>::type;
  using T = typename Element<C.dtype>::real;
  using Grid = Threads<C.threads_q, C.threads_k>;
  using Source = Rows<E, C.features.part == kAnywhere>;
  static constexpr int kThreads = Grid::kCount, kChunk = C.chunk;
  template <class From, int kRows, int kColumns> using Part = typename ChunkOf<From, T, kThreads, C.copy, kRows, kColumns>::type;

  Grid grid;
  T *stage, *other_stage;

  __device__ explicit Products(T *stages) : stage(stages), other_stage(stages + C.stage_elements()) {}

  __device__ __forceinline__ T *next_stage() {
    T *next = other_stage;
    other_stage = stage;
    return stage = next;
  }

  // acc += A B^T over kDim columns, with A's rows from a0 on and B's rows from b0 on. acc(i, j) belongs to row<WM>(i), column<WN>(j). A
  // long sum rounds more, so acc is summed in runs of kRun columns: after each run except the last one, end_of_run(whether this is the
  // first run) keeps acc elsewhere and sets acc to 0.
  template <int kDim, int kRun, int M, int N, class Other, class F>
  __device__ __forceinline__ void nt_in_runs(T (&acc)[M][N], const Source &A, i32 a0, const Other &B, i32 b0, F &&end_of_run) {
    constexpr int kRowsA = C.threads_q * M, kRowsB = C.threads_k * N;
    static_assert(kRun % kChunk == 0 && kDim % kRun == 0);
    Part<Source, kRowsA, kChunk> a(A, a0, 0);
    Part<Other, kRowsB, kChunk> b(B, b0, 0);
    a.load(A), b.load(B);
#pragma unroll 1
    for (int c = 0; c < kDim; c += kChunk) {
      T *sa = next_stage(), *sb = sa + kRowsA * kChunk;
      a.template store_transposed<C.threads_q * piece<T>(M)>(sa), b.template store_transposed<C.threads_k * piece<T>(N)>(sb);
      __syncthreads();
      if (c && c % kRun == 0) end_of_run(c == kRun); // here, because no operands wait in registers
      if (c + kChunk < kDim) {
        a.next_columns(A), b.next_columns(B);
        a.load(A), b.load(B);
      }
      multiply<kChunk, kRowsA, kRowsB, true>(grid, acc, sa, sb);
    }
  }

  // acc += P^T B for the `length` rows of B from b0 on, and kDim columns from `column` on. P lies in shared memory, in at most kLines lines
  // with a pitch of kStride.
  template <int kDim, int kLines, int kStride, int M, int N, class Other>
  __device__ __forceinline__ void tn(T (&acc)[M][N], const T *p, const Other &B, i32 b0, i32 length, i32 column = 0) {
    constexpr int kAtOnce = C.columns_staged(kDim), kMine = kAtOnce / C.threads_k; // per thread
    static_assert(kAtOnce == kDim || kMine % 4 == 0, "columns of a part are adjacent in acc");
    if constexpr (kAtOnce == kDim) {
      of_rows<kDim, kLines, kStride>(acc, p, B, b0, length, column, [](i32) {});
    } else {
#pragma unroll
      for (int part = 0; part < kDim / kAtOnce; ++part) {
        T x[M][kMine];
#pragma unroll
        for (int i = 0; i < M * kMine; ++i) x[i / kMine][i % kMine] = acc[i / kMine][part * kMine + i % kMine];
        of_rows<kAtOnce, kLines, kStride>(x, p, B, b0, length, column + part * kAtOnce, [](i32) {});
#pragma unroll
        for (int i = 0; i < M * kMine; ++i) acc[i / kMine][part * kMine + i % kMine] = x[i / kMine][i % kMine];
      }
    }
  }

  // P^T B in runs of kRun rows, because a long sum rounds more. After each run end_of_run takes its sum. end_of_run's arguments: the sum,
  // the number of the sum's first column among the thread's columns, and whether the run is the first one. M: rows per thread.
  template <int kDim, int kLines, int kStride, int kRun, int M, class Other, class F>
  __device__ __forceinline__ void tn_in_runs(const T *p, const Other &B, i32 b0, i32 length, i32 column, F &&end_of_run) {
    constexpr int kAtOnce = C.columns_staged(kDim), kMine = kAtOnce / C.threads_k;
    static_assert(kAtOnce == kDim || kMine % 4 == 0, "columns of a part are adjacent");
    static_assert(kRun % C.rows_staged(kLines, kAtOnce) == 0);
#pragma unroll
    for (int part = 0; part < kDim / kAtOnce; ++part) {
      T sum[M][kMine] = {};
      of_rows<kAtOnce, kLines, kStride>(sum, p, B, b0, length, column + part * kAtOnce, [&](i32 rows) {
        if (rows % kRun && rows < length) return;
        end_of_run(sum, part * kMine, rows <= kRun);
#pragma unroll
        for (int i = 0; i < M * kMine; ++i) sum[i / kMine][i % kMine] = T(0);
      });
    }
  }

private:
  // tn() for columns that are staged at once. Calls after(how many rows have been added) after each stage.
  template <int kDim, int kLines, int kStride, int M, int N, class Other, class F>
  __device__ __forceinline__ void of_rows(T (&acc)[M][N], const T *p, const Other &B, i32 b0, i32 length, i32 column, F &&after) {
    constexpr int kRows = C.rows_staged(kLines, kDim);
    Part<Other, kRows, kDim> b(B, b0, column);
    b.load(B);
#pragma unroll 1
    for (int k = 0; k < length; k += kRows, p += kRows * kStride) {
      T *sb = next_stage();
      const bool finite = b.template store<kDim>(sb);
      const bool seldom = __syncthreads_or(!finite);
      if (k + kRows < length) {
        b.next_rows(B);
        b.load(B);
      }
      if (seldom)
        multiply_seen<kRows, kStride, kDim>(grid, acc, p, sb);
      else
        multiply<kRows, kStride, kDim, false>(grid, acc, p, sb);
      after(k + kRows);
    }
  }
};

} // namespace strobe::simt
