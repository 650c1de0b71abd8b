// Gradients of the tensors that the caller's function of the score captures. A load l of f's reads element e of a captured tensor, and
//   dcaptured[e] = the sum over all loads and all pairs that read e of dS * df/dl.
// The passes recompute dS tile by tile. Where all pairs of a line of the score matrix (a row, a column or a diagonal) read one element,
// the line is summed first, in a fixed order, and its sum is added to the element. Sums over elements are integers in fixed point, because
// the order of integer additions does not matter: the results have the same bits in every run.
#pragma once
#include "../ptx/atomic.h"
#include "captured_config.h"
#include "scores.h"

namespace strobe {

// CallersFunctions (functions.h) also has, if gradients are wanted:
//   kLoads                                        how many loads there are
//   captured_of(load)                             which tensor it reads
//   is_unit(load)                                 whether df/dl is 1 for all pairs
//   gradients<kFunctions, kSome>(a, at, x, out)   df/dl for each load of the LoadSet kSome
//   element<kFunctions, kLoad>(a, g, at, x)       which element of its tensor a load reads; elements are numbered row by row

// Calls f(Load<n>()) for each load n of the launch.
template <int n> struct Load {
  static constexpr int kNumber = n;
};
template <LoadSet kLoads, int n = kLoads.first, class F> __device__ __forceinline__ void each_load(F &&f) {
  if constexpr (n < kLoads.end()) {
    if constexpr (kLoads.has(n)) f(Load<n>());
    each_load<kLoads, n + 1>(f);
  }
}

// The number of a line among all lines of the call: of rows Inputs::row_index, of columns column_index, of diagonals the following.
__device__ __forceinline__ i64 column_index(const Inputs &in, i64 b, i64 h, i64 row) {
  return in.cu_seqlens_q ? h * in.total_k + row : (b * in.heads + h) * in.seqlen_k + row;
}
// Tiles of `tile` x `tile` scores lie along diagonals, too: number `of_tiles` has those with i - j = (of_tiles - (tiles of keys - 1)) *
// tile for their first query and key. It has 2 * tile lines, the first of which is empty: line n has i - j = that + n - tile.
struct Diagonals {
  i32 tiles_q, tiles_k, tile;
  __device__ __forceinline__ Diagonals(const Inputs &in, i32 tile)
      : tiles_q((i32)div_up(in.seqlen_q, tile)), tiles_k((i32)div_up(in.seqlen_k, tile)), tile(tile) {}
  __device__ __forceinline__ i32 count() const { return tiles_q + tiles_k - 1; }
  __device__ __forceinline__ i32 difference(i32 of_tiles) const { return (of_tiles - (tiles_k - 1)) * tile; }
  __device__ __forceinline__ i64 line(const Inputs &in, i64 b, i64 h, i32 of_tiles, i32 n) const {
    return (((b * in.heads + h) * count() + of_tiles) * 2 * tile) + n;
  }
};

// Fixed point.
__device__ __forceinline__ u64 size_bits(double x) { return (u64)__double_as_longlong(x) & ~(1ull << 63); }
__device__ __forceinline__ bool is_number(u64 size) { return size < 0x7FFull << 52; }
__device__ __forceinline__ u64 finite_size(double x) { return is_number(size_bits(x)) ? size_bits(x) : 0; }
__device__ __forceinline__ double power_of_2(i32 k) { return __longlong_as_double((i64)(k + 1023) << 52); }
// The largest k for which 2^log2_values values of at most this size, times 2^k, have a sum below 2^62, if numbers of type T have 2^k.
template <class T> __device__ __forceinline__ i32 fixed_exponent(u64 size, i32 log2_values) {
  const i32 exponent = (i32)(size >> 52) - 1022; // the size is below 2^exponent
  return min(max(62 - log2_values - exponent, -1022), sizeof(T) == 8 ? 1000 : 120);
}
// x times 2^k. FP64 has a second integer for what the first rounds away: that rest, at most 1/2, times 2^(62 - log2_values).
template <class T> struct Fixed {
  i64 high;
  __device__ __forceinline__ Fixed(T x, i32 k, i32) : high(__float2ll_rn(x * (float)power_of_2(k))) {}
  __device__ __forceinline__ void add_over_warp() {
#pragma unroll
    for (int n = 16; n; n /= 2) high += __shfl_xor_sync(0xFFFFFFFFu, high, n);
  }
};
template <> struct Fixed<double> {
  i64 high, low;
  __device__ __forceinline__ Fixed(double x, i32 k, i32 log2_values) {
    x *= power_of_2(k);
    high = __double2ll_rn(x);
    low = __double2ll_rn((x - (double)high) * power_of_2(62 - log2_values));
  }
  __device__ __forceinline__ void add_over_warp() {
#pragma unroll
    for (int n = 16; n; n /= 2) high += __shfl_xor_sync(0xFFFFFFFFu, high, n), low += __shfl_xor_sync(0xFFFFFFFFu, low, n);
  }
};

// Adds to the sums of an element of a tensor.
__device__ __forceinline__ void add_to(const CapturedArguments &a, i64 element, const Fixed<float> &x) {
  if (x.high) add_to(a.sums + element, x.high);
}
__device__ __forceinline__ void add_to(const CapturedArguments &a, i64 element, const Fixed<double> &x) {
  if (x.high) add_to(a.sums + element, x.high);
  if (x.low) add_to(a.sums + a.elements + element, x.low);
}
// Adds a value to an element; largest: of the tensor's finite values. A value that is not finite makes the element NaN.
template <class T>
__device__ __forceinline__ void add_pair(const CapturedArguments &a, const CapturedGradient &g, i64 element, u64 largest, T x) {
  if (is_number(size_bits(x)))
    add_to(a, element, Fixed<T>(x, fixed_exponent<T>(largest, g.log2_values), g.log2_values));
  else
    a.broken[element] = 1;
}
// The value of the sums.
template <class T> __device__ __forceinline__ double fixed_sum(const CapturedArguments &a, i64 element, i32 k, i32 log2_values) {
  double sum = (double)a.sums[element];
  if constexpr (sizeof(T) == 8) sum += (double)a.sums[a.elements + element] * power_of_2(log2_values - 62);
  return sum * power_of_2(-k);
}

// Raises `largest` to the largest size of a warp's values; all lanes take part.
__device__ __forceinline__ void raise_by_warp(u64 *largest, u64 size) {
#pragma unroll
  for (int n = 16; n; n /= 2) size = max(size, (u64)__shfl_xor_sync(0xFFFFFFFFu, size, n));
  if (threadIdx.x % 32 == 0 && size) raise_to(largest, size);
}

// The values of a pair: dS times df/dl for each load of the launch, 0 where dS is.
template <Features F, Functions kFunctions, LoadSet kWanted, class T> struct PairValues {
  using Of = CallersFunctions<F.program, F.program_high>;
  T x, dS, slopes[Of::kLoads];
  PlaceOfPair at;

  __device__ __forceinline__ PairValues(const FunctionArguments &a, const PlaceOfPair &at, T x, T dS) : x(x), dS(dS), at(at) {
    Of::template gradients<kFunctions, kWanted>(a, at, x, slopes);
  }
  template <int kLoad> __device__ __forceinline__ T value() const {
    if constexpr (Of::is_unit(kLoad)) return dS;
    return dS == T(0) ? T(0) : dS * slopes[kLoad];
  }
  template <int kLoad> __device__ __forceinline__ i64 element(const FunctionArguments &a, const CapturedGradient &g) const {
    return Of::template element<kFunctions, kLoad>(a, g, at, x);
  }
};

} // namespace strobe
