// Settles rows whose LSE is large. LSE is rounded to its last bit, so it is off by up to eps |LSE|. In P = exp(s - LSE) this multiplies the
// whole row by a wrong factor. So P and P (dP - D) of such rows are summed before the gradients are computed. These sums give D and the
// correction of LSE: P = exp(s - LSE - correction).
#pragma once
#include "../attention/arguments.h"
#include "../attention/features.h"
#include "../attention/part.h"
#include "../ptx/math.h"

namespace strobe {

// Whether a row has to be settled. T: the type of LSE. Beyond these limits, half of LSE's last bit is at least about 1e-12 for FP64, 1e-6
// for FP32 and 6e-5 for 16 bits.
template <i32 kDType, class T> __device__ __forceinline__ bool large_lse(T lse) {
  constexpr T kLarge = kDType == kF64 ? T(1e4) : kDType == kF32 ? T(16) : T(1024);
  return abs(lse) > kLarge && abs(lse) < -minus_infinity<T>();
}

// Corrects D and LSE of a row. sum, rest: the sums of P and of P (dP - delta[0]) over the keys that the row sees. On entry, delta[0] is
// rowsum(dO * O) - dLSE.
template <class T> __device__ __forceinline__ void settle_row(const BackwardArguments &a, i32 b, i32 h, i64 row, T lse, T sum, T rest) {
  T *delta = static_cast<T *>(a.delta) + a.in.row_index(b, h, row);
  const T sink = a.in.sinks ? *a.in.sinks.template at<const T>(0, h, 0, 0) : minus_infinity<T>();
  const T of_sink = exp2((sink - lse) * kLog2e<T>), total = sum + of_sink;
  if (!(total > T(0) && total < -minus_infinity<T>())) return;
  const T dlse = a.dlse ? *a.dlse.template at<const T>(b, h, row, 0) : T(0), D = delta[0] + dlse; // rowsum(dO * O), not yet corrected
  delta[0] = D + (rest - dlse * sum - of_sink * D) / total - dlse;
  delta[a.in.rows()] = log2(total) * kLn2<T>;
}

// The kernel that settles rows, launched after D has been computed. A thread block takes a tile of queries and returns at once if no LSE is
// large. Tile makes P and dS as the backward that follows does. Its members: kDType, kThreads, kTileQ, features(), kOwn (whether a row is
// settled only if its own LSE is large), T (LSE's type), and row_sums(b, h, sequence, q0), the sums of P and dS over all keys of this
// thread's row.
template <class T> struct RowSums {
  T P, dS;
};
template <class Tile> __device__ __forceinline__ void settle_rows(const BackwardArguments &a) {
  extern __shared__ __align__(128) unsigned char shared[];
  using T = typename Tile::T;
  static_assert(Tile::kTileQ <= Tile::kThreads);
  const Inputs &in = a.in;
  constexpr Features F = Tile::features();
  const u32 tiles = (u32)query_tiles<F, Tile::kTileQ>(in), pair = blockIdx.x / tiles;
  const i32 b = (i32)(pair / in.heads), h = (i32)(pair % in.heads), t = (i32)threadIdx.x;
  const auto [q0, sequence] = queries_of<F, Tile::kTileQ>(in, b, (i32)(blockIdx.x % tiles));
  const bool mine = t < Tile::kTileQ && q0 + t < sequence.band.seqlen_q;
  const i64 row = sequence.q0 + q0 + t;
  const T lse = mine ? *a.lse.at<const T>(b, h, row, 0) : T(0);
  if (!__syncthreads_or(large_lse<Tile::kDType>(lse))) return;
  const RowSums<T> sums = Tile{a, shared}.row_sums(b, h, sequence, q0);
  if (mine && (!Tile::kOwn || large_lse<Tile::kDType>(lse))) settle_row(a, b, h, row, lse, sums.P, sums.dS);
}

} // namespace strobe
