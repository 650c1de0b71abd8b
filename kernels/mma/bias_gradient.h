// dbias = dS, summed over what bias was broadcast over. A block of threads owns a tile of dbias, walks over all tiles of scores that add to
// it, in a fixed order, and computes them anew: nothing is shared, so it takes no workspace and is the same over runs.
#pragma once
#include "../tile/copy.h"
#include "backward_config.h"
#include "backward_dropout.h"
#include "backward_scores.h"

namespace strobe::mma {

template <BiasGradientConfig C> struct BiasGradient {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    BiasGradient(a, shared).run();
  }

private:
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kTileQ = C.tile_q, kTileK = C.tile_k;
  static constexpr int kKeys = kTileK / C.key_warps / 16, kQueries = kTileQ / C.query_warps / 16; // of a warp, in blocks of 16
  static constexpr u32 kK = 0, kV = kK + C.k_bytes(), kQ = kV + C.v_bytes(), kDo = kQ + C.q_bytes();

  // One tile of scores.
  struct Part {
    i32 batch, head, q0, k0;
  };

  const Arguments &a;
  const Inputs &in;
  float *sums; // the tile of dbias, transposed, where the inputs were
  u32 shared;
  int thread, key_warp, query_warp;

  __device__ __forceinline__ BiasGradient(const Arguments &a, unsigned char *memory)
      : a(a), in(a.in), sums((float *)memory), shared(shared_address(memory)), thread((int)threadIdx.x),
        key_warp(thread / 32 % C.key_warps), query_warp(thread / 32 / C.key_warps) {}

  template <int kRows, int kColumns>
  __device__ __forceinline__ void load(u32 target, const Operand &x, i32 b, i32 h, i64 row, i32 rows, i32 columns) const {
    tile::Matrix<const T> m{x.at<const T>(b, h, row, 0), x.stride[2], x.stride[3], rows, columns};
    tile::load<kRows, kColumns, kThreads, C.aligned != 0>(shared + target, m, thread);
  }

  // Is block (q0, k0) kept? A tile lies within one.
  __device__ __forceinline__ bool kept(const Part &p) const {
    if constexpr (F.blocks) {
      BlockRow row = in.blocks.row(p.batch, p.head, p.q0 / in.blocks.row_tokens);
      i64 block = p.k0 / in.blocks.column_tokens, low = 0, high = row.count;
      while (low < high) {
        i64 middle = (low + high) / 2;
        if (row.cols[middle] < block)
          low = middle + 1;
        else
          high = middle;
      }
      return low < row.count && row.cols[low] == block;
    }
    return true;
  }

  // D of a row before q1, and in.rows() further what its LSE lacks.
  __device__ __forceinline__ const float *delta_of(const Part &p, const Sequence &sequence, i32 row, i32 q1) const {
    return (const float *)a.delta + in.row_index(p.batch, p.head, sequence.q0 + min(row, q1 - 1));
  }

  // sum += dS^T of a tile
  __device__ __forceinline__ void add(Accumulator (&sum)[kKeys][kQueries], const Part &p) const {
    Sequence sequence = in.sequence(p.batch);
    const Band &band = sequence.band;
    i32 q1 = (i32)min((i64)p.q0 + kTileQ, band.seqlen_q), k1 = (i32)min((i64)p.k0 + kTileK, band.seqlen_k);
    if (q1 <= p.q0 || k1 <= p.k0 || intersect(band.keys_any(p.q0, q1), {p.k0, k1}).empty() || !kept(p)) return;
    Range all = band.keys_all(p.q0, q1);
    bool masked = p.k0 < all.begin || p.k0 + kTileK > all.end;

    __syncthreads();
    i64 row_q = sequence.q0 + p.q0, row_k = sequence.k0 + p.k0;
    load<kTileK, kD>(kK, in.k, p.batch, p.head / in.group, row_k, k1 - p.k0, in.head_dim);
    load<kTileK, kDv>(kV, in.v, p.batch, p.head / in.group, row_k, k1 - p.k0, in.head_dim_v);
    load<kTileQ, kD>(kQ, in.q, p.batch, p.head, row_q, q1 - p.q0, in.head_dim);
    load<kTileQ, kDv>(kDo, a.dout, p.batch, p.head, row_q, q1 - p.q0, in.head_dim_v);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    Scores<F, float> scores(in, sequence, p.batch);
    i32 i = p.q0 + query_warp * kQueries * 16, j = p.k0 + key_warp * kKeys * 16;
    Accumulator P[kKeys][kQueries] = {}, dP[kKeys][kQueries] = {};
    multiply<T, kD, false>(P, shared + kK + key_warp * kKeys * 16 * kD * 2, shared + kQ + query_warp * kQueries * 16 * kD * 2);
    auto lse = [&](RowLse &x, int n) { // of rows that are not there, or see nothing: +inf
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        i32 row = i + 16 * n + tile::lane_column(k / 2, k % 2);
        x.lse[k] = row < q1 ? *a.lse.at<const float>(p.batch, p.head, sequence.q0 + row, 0) : minus_infinity<float>();
        if (x.lse[k] == minus_infinity<float>()) x.lse[k] = -x.lse[k];
        x.excess[k] = delta_of(p, sequence, row, q1)[in.rows()] * 1.4426950408889634f;
      }
    };
    if (masked)
      probabilities<F, true, false>(P, P, scores, p.head, i, j, k1, lse);
    else
      probabilities<F, false, false>(P, P, scores, p.head, i, j, k1, lse);
    BlockDropout<F> dropout{Dropout<F>(in)};
    if constexpr (F.dropout) dropout.mark(P, i, j, p.head, p.batch);
    multiply<T, kDv, false>(dP, shared + kV + key_warp * kKeys * 16 * kDv * 2, shared + kDo + query_warp * kQueries * 16 * kDv * 2);
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        int c = k / 2, e = k % 2;
        float D = *delta_of(p, sequence, i + 16 * n + tile::lane_column(c, e), q1);
#pragma unroll
        for (int m = 0; m < kKeys; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float x = dP[m][n].x[c][2 * r + e], probability = P[m][n].x[c][2 * r + e];
            if constexpr (F.dropout) {
              x = __float_as_uint(probability) >> 31 ? 0.0f : x * dropout.dropout.factor();
              probability = fabsf(probability);
            }
            if (probability != 0) sum[m][n].x[c][2 * r + e] += probability * (x - D); // what is not seen may be no number
          }
        }
      }
    }
  }
  __device__ __forceinline__ void write(i32 b, i32 h, i64 i, i64 j, float x) const {
    using B = typename Element<F.bias>::type;
    *a.dbias.at<B>(b, h, i, j) = Convert<B>::from(x);
  }

  __device__ __forceinline__ void run() {
    // What dbias has an axis for is this block's share; the rest is summed.
    bool batches = a.dbias.stride[0] != 0, heads = a.dbias.stride[1] != 0, rows = a.dbias.stride[2] != 0, columns = a.dbias.stride[3] != 0;
    u32 index = blockIdx.x, tiles_q = (u32)div_up(in.seqlen_q, kTileQ), tiles_k = (u32)div_up(in.seqlen_k, kTileK);
    i32 own_k = columns ? (i32)(index % tiles_k) : 0;
    index = columns ? index / tiles_k : index;
    i32 own_q = rows ? (i32)(index % tiles_q) : 0;
    index = rows ? index / tiles_q : index;
    i32 own_h = heads ? (i32)(index % in.heads) : 0, own_b = batches ? (i32)(heads ? index / in.heads : index) : 0;

    Accumulator sum[kKeys][kQueries] = {};
    for (i32 b = own_b; b < (batches ? own_b + 1 : in.batch); ++b) {
      for (i32 h = own_h; h < (heads ? own_h + 1 : in.heads); ++h) {
        for (i32 q = own_q; q < (rows ? own_q + 1 : (i32)tiles_q); ++q) {
          for (i32 k = own_k; k < (columns ? own_k + 1 : (i32)tiles_k); ++k) add(sum, {b, h, q * kTileQ, k * kTileK});
        }
      }
    }

    __syncthreads();
    constexpr int kPitch = C.sums_pitch();
#pragma unroll
    for (int m = 0; m < kKeys; ++m) {
#pragma unroll
      for (int n = 0; n < kQueries; ++n) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          int c = k / 4, r = k / 2 % 2, e = k % 2;
          sums[((key_warp * kKeys + m) * 16 + tile::lane_row(r)) * kPitch + (query_warp * kQueries + n) * 16 + tile::lane_column(c, e)] =
              sum[m][n].x[c][2 * r + e];
        }
      }
    }
    __syncthreads();
    i64 i0 = (i64)own_q * kTileQ, j0 = (i64)own_k * kTileK;
    if (rows && columns) {
      for (int n = thread; n < kTileQ * kTileK; n += kThreads) {
        int i = n / kTileK, j = n % kTileK;
        if (i0 + i < in.seqlen_q && j0 + j < in.seqlen_k) write(own_b, own_h, i0 + i, j0 + j, sums[j * kPitch + i]);
      }
    } else { // a sum over queries, keys or both
      for (int n = thread; n < (rows ? kTileQ : kTileK); n += kThreads) {
        float x = 0;
        for (int k = 0; k < (rows ? kTileK : kTileQ); ++k) x += rows ? sums[k * kPitch + n] : sums[n * kPitch + k];
        if (rows && i0 + n < in.seqlen_q) write(own_b, own_h, i0 + n, 0, x);
        if (columns && j0 + n < in.seqlen_k) write(own_b, own_h, 0, j0 + n, x);
        if (!rows) sums[n * kPitch] = x;
      }
      __syncthreads();
      if (!rows && !columns && thread == 0) {
        float x = 0;
        for (int n = 0; n < kTileK; ++n) x += sums[n * kPitch];
        write(own_b, own_h, 0, 0, x);
      }
    }
  }
};

} // namespace strobe::mma
