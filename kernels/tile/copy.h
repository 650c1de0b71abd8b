// Copies tiles between global and shared memory with kThreads threads; `thread` is the calling thread's number.
#pragma once
#include "shared.h"

namespace strobe::tile {

// A matrix in global memory. Elements beyond its rows and columns are not accessed; they read as zero.
template <class T> struct Matrix {
  T *data;
  i64 row_stride, column_stride; // elements
  i32 rows, columns;
  __device__ __forceinline__ T *row(i32 i) const { return data + i * row_stride; }
};

// A source that looks up the address of each row in a table in memory.
template <class Rows>
concept LooksUp = requires { Rows::kLooksUp; };

// A matrix for which load() finds rows by adding row_stride. That takes fewer instructions than an address for each row, which matters
// where copies take much of the time.
template <class T> struct StridedMatrix : Matrix<T> {
  static constexpr bool kStrided = true;
};
template <class Rows>
concept Strided = requires { Rows::kStrided; };

// A source whose addresses are held by a warp: lane r has the address of row r. For aligned copies of 16-bit elements only.
struct RowsOfLanes {
  static constexpr bool kOfLanes = true;
  const void *address;
  i32 rows, columns;
};
template <class Rows>
concept OfLanes = requires { Rows::kOfLanes; };

// Which 16-byte chunks of a tile a thread copies: the chunks chunk + k * kAcross of the rows row + i * kDown.
template <int kRows, int kColumns, int kThreads> struct Share {
  using L = Layout<kColumns>;
  static constexpr int kAcross = min(L::kPower, 32), kAlong = L::kChunks / kAcross;
  static constexpr int kDown = kThreads / kAcross, kSteps = (int)div_up(kRows, kDown);
  int chunk, row;
  __device__ __forceinline__ explicit Share(int thread) : chunk(thread % kAcross), row(thread / kAcross) {}
  __device__ __forceinline__ bool inside(int i) const { return kRows % kDown == 0 || row + i * kDown < kRows; }
  // Where a chunk of row + i * kDown lies in the tile. The swizzle repeats after kPeriod steps; further places are found by adding an
  // offset that all threads share.
  static constexpr int kPeriod = kDown % 8 ? 8 / (kDown & -kDown) : 1;
  __device__ __forceinline__ u32 place(int i, int chunk) const {
    return L::offset(row + i % kPeriod * kDown, chunk) + (u32)(i / kPeriod * kPeriod * kDown * L::kPitch);
  }
};

// Loads a tile from global to shared memory. m: a Matrix, or any type with row(), rows, columns and column_stride. kAligned (also in
// store()): columns are adjacent; base, rows and m.columns are multiples of 16 bytes; loads are asynchronous.
template <int kRows, int kColumns, int kThreads, bool kAligned, class Rows>
__device__ __forceinline__ void load(u32 base, const Rows &m, int thread) {
  using S = Share<kRows, kColumns, kThreads>;
  S s(thread);
#pragma unroll(kAligned ? S::kAlong : 1)
  for (int k = 0; k < S::kAlong; ++k) {
    int chunk = s.chunk + k * S::kAcross;
    i32 columns = m.columns - 8 * chunk, rows = columns > 0 ? m.rows - s.row : 0;
    if constexpr (kAligned && LooksUp<Rows> && S::kSteps > 8) {
      // Reads several rows' addresses at a time: they come from a table in memory, and a copy waits for its address.
      constexpr int kBatch = 8;
#pragma unroll
      for (int first = 0; first < S::kSteps; first += kBatch) {
        decltype(m.row(0)) from[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n) from[n] = m.row(s.row + (first + n) * S::kDown);
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
          const int i = first + n;
          if (i < S::kSteps && s.inside(i))
            cp_async(base + S::L::offset(s.row + i * S::kDown, chunk), from[n] + 8 * chunk, i * S::kDown < rows);
        }
      }
    } else if constexpr (OfLanes<Rows>) {
      static_assert(kAligned && kRows <= 32 && kRows % S::kDown == 0, "lanes ask one another");
#pragma unroll
      for (int i = 0; i < S::kSteps; ++i) {
        const u64 from = __shfl_sync(0xFFFFFFFFu, (u64)m.address, s.row + i * S::kDown);
        cp_async(base + s.place(i, chunk), (const char *)from + 16 * chunk, i * S::kDown < rows);
      }
    } else if constexpr (kAligned && Strided<Rows>) {
      const auto *const first = m.row(s.row) + 8 * chunk;
#pragma unroll
      for (int i = 0; i < S::kSteps; ++i) {
        if (s.inside(i)) cp_async(base + s.place(i, chunk), first + i * S::kDown * m.row_stride, i * S::kDown < rows);
      }
    } else if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < S::kSteps; ++i) {
        if (s.inside(i))
          cp_async(base + S::L::offset(s.row + i * S::kDown, chunk), m.row(s.row + i * S::kDown) + 8 * chunk, i * S::kDown < rows);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < S::kSteps && s.inside(i); ++i) {
        auto source = m.row(s.row + i * S::kDown) + 8 * chunk * m.column_stride;
        u32 x[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (i * S::kDown < rows && e < columns) x[e / 2] |= (u32)source[e * m.column_stride].bits << 16 * (e % 2);
        }
        store_shared(base + S::L::offset(s.row + i * S::kDown, chunk), x);
      }
    }
  }
}

// Stores a tile from shared to global memory.
template <int kRows, int kColumns, int kThreads, bool kAligned, class T>
__device__ __forceinline__ void store(const Matrix<T> &m, u32 base, int thread) {
  using S = Share<kRows, kColumns, kThreads>;
  S s(thread);
#pragma unroll
  for (int k = 0; k < S::kAlong; ++k) {
    int chunk = s.chunk + k * S::kAcross;
    i32 columns = m.columns - 8 * chunk, rows = columns > 0 ? m.rows - s.row : 0;
    i64 column = 8 * chunk * (kAligned ? 1 : m.column_stride);
#pragma unroll
    for (int i = 0; i < S::kSteps; ++i) {
      if (!s.inside(i) || i * S::kDown >= rows) continue;
      T *target = m.row(s.row + i * S::kDown) + column;
      u32 x[4];
      load_shared(x, base + S::L::offset(s.row + i * S::kDown, chunk));
      if constexpr (kAligned) {
        store_global(target, x);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e < columns) target[e * m.column_stride].bits = (unsigned short)(x[e / 2] >> 16 * (e % 2));
        }
      }
    }
  }
}

} // namespace strobe::tile
