// Computes what the backward needs of each row: D = rowsum(dO * O) - dLSE. LSE's correction is set to 0, until a row is settled. The same
// kernel clears the sum of dQ, tile by tile.
#pragma once
#include "../attention/features.h"
#include "../attention/part.h"
#include "../ptx/math.h"
#include "../tile/exchange.h"
#include "row_tile.h"

namespace strobe::passes {

template <RowsConfig C> struct Delta {
  using Arguments = BackwardArguments;
  using E = typename Element<C.dtype>::type;
  using T = typename Element<C.dtype>::real;
  static constexpr bool kHopper = C.form == kWarpgroups;
  static constexpr int kThreads = C.delta_threads();
  static constexpr int kBlocksPerSm = kHopper                ? ((C.part || C.packed) && C.tile_q == 80 ? 3 : 4)
                                      : C.form == kFragments ? 2
                                                             : 1; // limited by registers

  static __device__ __forceinline__ void run(const Arguments &a) {
    const RowTile<C> tile(a.in);
    if constexpr (kHopper) {
      if (a.ticket && blockIdx.x == 0 && threadIdx.x == 0) *a.ticket = 0;
    }
    if (tile.rows == 0) return;
    if constexpr (C.form != kRowAfterRow) clear_dq(a, tile); // stores first: they wait for nothing
    if constexpr (C.partial && !kHopper)
      take_given(a, tile);
    else if constexpr (C.form == kRowAfterRow)
      sum_in_runs(a, tile);
    else
      sum_across_lanes(a, tile);
  }

private:
  static __device__ __forceinline__ void clear_dq(const Arguments &a, const RowTile<C> &tile) {
    if constexpr (kHopper) {
      if (a.turns && threadIdx.x < 2) a.turns[2 * tile.number + threadIdx.x] = 0;
    }
    if (!a.dq_sum || (kHopper && a.first_stores)) return;
    float4 *sum = (float4 *)(a.dq_sum + tile.number * (C.tile_q * C.head_dim));
    // Hopper: a tile consists of pieces of 64 columns, of which only the last one ends with padding; or, with up to 64 columns, of two
    // pieces with half of the queries each.
    constexpr int kQueries = kHopper ? dq_queries(C.head_dim, C.tile_q) : C.tile_q;
    const int used = kQueries * (kHopper ? (a.in.head_dim + 15) / 16 * 16 : C.head_dim) / 4;
#pragma unroll
    for (int first = 0; first < C.tile_q * C.head_dim / 4; first += kQueries * C.head_dim / 4) {
      for (int i = (int)threadIdx.x; i < used; i += kThreads) sum[first + i] = float4{0, 0, 0, 0};
    }
  }

  // D of 16-bit rows: kLanes lanes share a row, and each takes 8 columns at a time.
  static __device__ __forceinline__ void sum_across_lanes(const Arguments &a, const RowTile<C> &tile) {
    const Inputs &in = a.in;
    constexpr int kLanes = kHopper && C.head_dim > 64 ? 16 : 8, kRows = kThreads / kLanes; // rows at a time
    constexpr int kSteps = kHopper ? C.tile_q / kRows : 1;                                 // all loads of these steps are in flight at once
    static_assert(!kHopper || C.tile_q % kRows == 0);
    const int lane = (int)threadIdx.x % kLanes;
    float *const rows = kHopper ? a.rows + tile.number * ((a.natural_lse ? 3 : 2) * C.tile_q) : nullptr;
    for (int i0 = 0; i0 < C.tile_q; i0 += kRows * kSteps) {
      const int first = i0 + (int)threadIdx.x / kLanes;
      const E *const out = a.out.at<const E>(tile.batch, tile.head, tile.row + first, 0);
      const E *const dout = a.dout.at<const E>(tile.batch, tile.head, tile.row + first, 0);
      float D[kSteps] = {}, zero[kSteps] = {}, zero_q[kSteps] = {}; // zero, zero_q: NaN unless dO (zero_q: Q) is finite
#pragma unroll 1
      for (i32 c = 8 * lane; c < in.head_dim_v; c += 8 * kLanes) {
        uint4 x[kSteps] = {}, y[kSteps] = {};
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          const int i = first + n * kRows;
          if (i >= tile.rows) continue;
          if constexpr (!C.partial) x[n] = load(out, a.out, n * kRows, c, in.head_dim_v);
          y[n] = load(dout, a.dout, n * kRows, c, in.head_dim_v);
        }
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          D[n] = kHopper ? D[n] + dot(x[n], y[n], 0) : dot(x[n], y[n], D[n]);
          if constexpr (kHopper) zero[n] += dot(uint4{}, y[n], 0);
        }
      }
      if (kHopper && (in.sinks || C.partial)) { // then a row that sees no key may have a finite LSE, whatever Q is
        const E *const q = in.q.at<const E>(tile.batch, tile.head, tile.row + first, 0);
#pragma unroll 1
        for (i32 c = 8 * lane; c < in.head_dim; c += 8 * kLanes) {
#pragma unroll
          for (int n = 0; n < kSteps; ++n) {
            if (first + n * kRows < tile.rows) zero_q[n] += dot(uint4{}, load(q, in.q, n * kRows, c, in.head_dim), 0);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        const int i = first + n * kRows;
#pragma unroll
        for (int m = kLanes / 2; m > 0; m /= 2) {
          D[n] += __shfl_xor_sync(0xFFFFFFFFu, D[n], m);
          if constexpr (kHopper) zero[n] += __shfl_xor_sync(0xFFFFFFFFu, zero[n], m);
          if (kHopper && (in.sinks || C.partial)) zero_q[n] += __shfl_xor_sync(0xFFFFFFFFu, zero_q[n], m);
        }
        if constexpr (kHopper) {
          if (lane == 0) write_statistics(a, tile, rows, i, D[n], zero[n] == 0, zero_q[n] == 0);
        } else if (lane == 0 && i < tile.rows) {
          write(a, tile, i, D[n]);
        }
      }
    }
  }
  // Loads 8 columns of the i-th row from `first` on; columns past the last one are 0.
  static __device__ __forceinline__ uint4 load(const E *first, const Operand &o, int i, i32 c, i32 columns) {
    const E *const row = first + i * o.stride[2];
    if constexpr (C.aligned) return *(const uint4 *)(row + c);
    alignas(16) E x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = c + e < columns ? row[(c + e) * o.stride[3]] : E{0};
    return *(const uint4 *)x;
  }
  static __device__ __forceinline__ float dot(const uint4 &x, const uint4 &y, float sum) {
    const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(tile::unpacked<E>(a[i / 2], i % 2), tile::unpacked<E>(b[i / 2], i % 2), sum);
    return sum;
  }

  // D of FP32 and FP64 rows, in the order and the runs of dP: if a query sees a single key, dP - D is then 0 and not a rounding error. One
  // thread takes a row.
  static __device__ __forceinline__ void sum_in_runs(const Arguments &a, const RowTile<C> &tile) {
    constexpr int kWidth = kRunOfColumns;
    __shared__ T dO[kThreads][kWidth + 1], O[kThreads][kWidth + 1];
    const Inputs &in = a.in;
    const i32 t = (i32)threadIdx.x;
    T D = T(0);
    for (i32 c0 = 0; c0 < in.head_dim_v; c0 += kWidth) {
      __syncthreads();
      for (i32 i = t; i < kThreads * kWidth; i += kThreads) {
        const i32 r = i / kWidth, c = c0 + i % kWidth;
        if (r < tile.rows && c < in.head_dim_v) {
          dO[r][i % kWidth] = to_real<T>(*a.dout.at<const E>(tile.batch, tile.head, tile.row + r, c));
          O[r][i % kWidth] = to_real<T>(*a.out.at<const E>(tile.batch, tile.head, tile.row + r, c));
        }
      }
      __syncthreads();
      T run = T(0);
      if (t < tile.rows)
        for (i32 c = 0; c < min(kWidth, in.head_dim_v - c0); ++c) run = fma(dO[t][c], O[t][c], run);
      D += run;
    }
    if (t < tile.rows) write(a, tile, t, D);
  }

  // D of a partial part. Its queries also see keys of other calls, so the caller gives rowsum(dO * O), and LSE's correction as the second
  // number of LSE.
  static __device__ __forceinline__ void take_given(const Arguments &a, const RowTile<C> &tile) {
    for (i32 i = (i32)threadIdx.x; i < tile.rows; i += kThreads) {
      write(a, tile, i, *a.given_delta.at<const T>(tile.batch, tile.head, tile.row + i, 0));
      const T low = a.lse.at<const T>(tile.batch, tile.head, tile.row + i, 0)[a.in.part->lse_low];
      static_cast<T *>(a.delta)[tile.index + i + a.in.rows()] = abs(low) < -minus_infinity<T>() ? low : T(0);
    }
  }

  static __device__ __forceinline__ T less_dlse(const Arguments &a, const RowTile<C> &tile, int i, T D) {
    return a.dlse ? D - *a.dlse.at<const T>(tile.batch, tile.head, tile.row + i, 0) : D;
  }
  static __device__ __forceinline__ void write(const Arguments &a, const RowTile<C> &tile, int i, T D) {
    T *delta = static_cast<T *>(a.delta) + tile.index + i;
    delta[0] = less_dlse(a, tile, i, D), delta[a.in.rows()] = T(0);
  }

  // Hopper: writes row i's LSE and D to the statistics of a query tile, which the backward loads at once (BackwardArguments::rows). finite,
  // q_finite: whether dO and Q are finite.
  static __device__ __forceinline__ void write_statistics(const Arguments &a, const RowTile<C> &tile, float *rows, int i, float D,
                                                          bool finite, bool q_finite) {
    const float infinity = -minus_infinity<float>();
    float lse = -infinity, correction = 0;
    if (i < tile.rows) {
      lse = *a.lse.at<const float>(tile.batch, tile.head, tile.row + i, 0);
      float *const delta = (float *)a.delta + tile.index + i, *const correction_of = delta + a.in.rows();
      if constexpr (C.partial) { // as in take_given
        D = less_dlse(a, tile, i, *a.given_delta.at<const float>(tile.batch, tile.head, tile.row + i, 0));
        const float low = a.lse.at<const float>(tile.batch, tile.head, tile.row + i, 0)[a.in.part->lse_low];
        if (fabsf(low) < infinity) correction = low;
      } else if (a.natural_lse) { // rows are already settled
        D = *delta, correction = *correction_of;
      } else {
        D = less_dlse(a, tile, i, D);
        if (a.delta) *delta = D, *correction_of = 0;
      }
    }
    if (!q_finite && fabsf(lse) < infinity) lse = -infinity; // the row sees only its sink: a score of such a Q would have made LSE NaN
    // If a row's dO is not finite or its LSE is NaN, P becomes NaN. If only D is not finite, because the row sees such a V, P stays valid
    // for dV.
    rows[i] = lse == -infinity ? lse : finite ? -lse * (a.natural_lse ? 1.0f : kLog2e<float>) : __int_as_float(0x7FC00000);
    if (C.partial && !a.natural_lse) rows[i] -= correction * kLog2e<float>;
    if (a.natural_lse) rows[i + C.tile_q] = -correction * kLog2e<float>;
    rows[i + (a.natural_lse ? 2 : 1) * C.tile_q] = finite && fabsf(lse) < infinity ? D : 0;
  }
};

} // namespace strobe::passes
