// The registers that wgmma reads and writes. The compiler does not see these accesses, so the types of this file tell it when they happen.
//
// A product begins at once and runs asynchronously, as a commit group of its own. wait_for<kPending>(x...) returns when at most the last
// kPending products of this warpgroup are still running; the products that read or write x... have then ended. Until then no code may read
// or write x... .
#pragma once
#include "../ptx/ldmatrix.h"
#include "../ptx/wgmma.h"
#include "messages.h"

namespace strobe::sm90 {

// A left operand: 64 rows, K columns.
template <int K> struct LeftOperand {
  u32 x[K / 4];

  __device__ __forceinline__ void done() { registers_changed(x); }
};

// Loads 16 rows, from `first` on, of a tile of kRows in shared memory.
template <int kRows, int K> __device__ __forceinline__ void load_left(LeftOperand<K> &x, u32 tile, int first, int lane) {
  const int row = first + lane % 16;
#pragma unroll
  for (int c = 0; c < K / 16; ++c) {
    const int chunk = c % 4 * 2 + lane / 16;
    ldmatrix(reinterpret_cast<u32(&)[4]>(x.x[4 * c]), tile + kRows * kRowBytes * (c / 4) + row * kRowBytes + ((chunk ^ row % 8) << 4));
  }
}

template <int kPending, class... Registers> __device__ __forceinline__ void wait_for(Registers &...registers) {
  wgmma_wait<kPending>();
  (registers.done(), ...);
}

// How the compiler treats a sum's registers before the sum's first product. kept: the registers belong to the sum throughout the loop.
// free: they may hold other values until the product begins.
enum class Place { kept, free };

// A sum of products of T: 64 x N, FP32.
template <class T, int N> struct Accumulator {
  float x[N / 2]; // in wgmma's layout (ptx/wgmma.h)

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) x[i] = 0;
    done();
  }

  // Tells the compiler that this sum is complete from here on, so that the wait for it is not moved.
  __device__ __forceinline__ void done() { registers_changed(x); }

  // Begins this = A B^T. A: 64 rows of a tile of kRows; B: N rows; both kInner columns wide.
  template <int kInner, int kRows, Place kPlace> __device__ __forceinline__ void begin_product(u32 A, u32 B) {
    if constexpr (kPlace == Place::kept) registers_changed(x);
    wgmma_fence();
    const u64 rows = descriptor_k_major(A), columns = descriptor_k_major(B);
#pragma unroll
    for (int c = 0; c < kInner / 16; ++c) {
      const u64 left = advance(rows, kRows * kRowBytes * (c / 4) + 32 * (c % 4));
      const u64 right = advance(columns, N * kRowBytes * (c / 4) + 32 * (c % 4));
      if (c > 0)
        Wgmma<T, N>::template shared<true>(x, left, right);
      else if constexpr (kPlace == Place::free)
        Wgmma<T, N>::template shared_anew<0>(x, left, right);
      else
        Wgmma<T, N>::template shared<false>(x, left, right);
    }
    wgmma_commit();
  }
  template <Place kPlace, int kInner> __device__ __forceinline__ void begin_product(LeftOperand<kInner> &A, u32 B) {
    if constexpr (kPlace == Place::kept) registers_changed(x);
    wgmma_fence();
    const u64 columns = descriptor_k_major(B);
#pragma unroll
    for (int c = 0; c < kInner / 16; ++c) {
      const u64 right = advance(columns, N * kRowBytes * (c / 4) + 32 * (c % 4));
      if (c > 0)
        Wgmma<T, N>::template registers<true, 0>(x, A.x + 4 * c, right);
      else if constexpr (kPlace == Place::free)
        Wgmma<T, N>::template registers_anew<0>(x, A.x, right);
      else
        Wgmma<T, N>::template registers<false, 0>(x, A.x, right);
    }
    wgmma_commit();
  }
  // Begins this = A^T B^T. A: kInner rows, of which 64 columns; B: N rows of a tile of kRows, kInner columns wide.
  template <int kInner, int kRows> __device__ __forceinline__ void begin_product_of_columns(u32 A, u32 B) {
    const u64 columns = descriptor_mn_major(A, 16), rows = descriptor_k_major(B);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
      const u64 left = advance(columns, 16 * kRowBytes * k), right = advance(rows, kRows * kRowBytes * (k / 4) + 32 * (k % 4));
      if (k == 0)
        Wgmma<T, N>::template shared_anew<1>(x, left, right);
      else
        Wgmma<T, N>::template shared<true, 1>(x, left, right);
    }
    wgmma_commit();
  }
  // Begins this += A B. A: 64 rows of a block of 64 columns in shared memory; B: 64 rows, N columns wide.
  __device__ __forceinline__ void begin_adding(u32 A, u32 B) {
    registers_changed(x);
    wgmma_fence();
    const u64 left = descriptor_k_major(A), rows = descriptor_mn_major(B, 64 * kRowBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma<T, N>::template shared<true, 0, 1>(x, advance(left, 32 * i), advance(rows, 16 * kRowBytes * i));
    wgmma_commit();
  }
  // Begins this += A B. B: kInner rows, N columns wide.
  template <int kInner> __device__ __forceinline__ void begin_adding(LeftOperand<kInner> &A, u32 B) {
    registers_changed(A.x);
    registers_changed(x);
    wgmma_fence();
    const u64 rows = descriptor_mn_major(B, kInner * kRowBytes);
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i) Wgmma<T, N>::template registers<true, 1>(x, A.x + 4 * i, advance(rows, 16 * kRowBytes * i));
    wgmma_commit();
  }
};

} // namespace strobe::sm90
