// d bias = dS, summed over the axes along which the bias was broadcast. A CTA owns a tile of it and walks what was broadcast, always in the
// same order, and needs no memory beside: P and dP are recomputed.
#pragma once
#include "gradient.h"
#include "walk.h"

namespace strobe::simt {

template <Config C> struct BiasGradient {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using T = typename Multiply::T;
  using B = typename Element<C.features.bias>::type;
  static constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_k;

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    constexpr i32 kPlace = max(C.p_elements(), C.pt_elements());
    T *P = reinterpret_cast<T *>(shared), *dS = P + kPlace, *whole = P;
    const RowStatistics<C, T> rows(dS + kPlace);
    Multiply multiply(dS + kPlace + 3 * C.tile_q);
    const auto grid = multiply.grid;
    const Dropout<C.features> dropout(in);
    const Kept<C> kept(dS + kPlace + 3 * C.tile_q + 2 * C.stage_elements());

    // Along each axis this CTA's tile, or all of them
    const i64 *stride = a.dbias.stride;
    u32 item = blockIdx.x;
    const Part keys(item, stride[3], div_up(in.seqlen_k, C.tile_k)), queries(item, stride[2], div_up(in.seqlen_q, C.tile_q)),
        heads(item, stride[1], in.heads), batches(item, stride[0], in.batch);

    T sum[kRows][kKeys] = {}, lost[kRows][kKeys] = {};
    for (i32 b = batches.begin; b < batches.end; ++b) {
      const Sequence s = in.sequence(b);
      const i32 seqlen_q = (i32)s.band.seqlen_q, seqlen_k = (i32)s.band.seqlen_k;
      const Scores<C.features, T> scores(in, s, b);
      for (i32 h = heads.begin; h < heads.end; ++h) {
        const i32 h_kv = h / in.group;
        const Rows<E> Q(in.q, b, h, s.q0, seqlen_q, in.head_dim), K(k_of<E>(in, s, b, h_kv), seqlen_k),
            dO(a.dout, b, h, s.q0, seqlen_q, in.head_dim_v), V(v_of<E>(in, s, b, h_kv), seqlen_k);
        for (i32 q0 = queries.begin * C.tile_q; q0 < min(queries.end * C.tile_q, seqlen_q); q0 += C.tile_q) {
          const i32 q1 = min(q0 + C.tile_q, seqlen_q);
          const Range any = s.band.keys_any(q0, q1), all = s.band.keys_all(q0, q1);
          __syncthreads(); // the last tile's statistics have been read
          rows.load(a, b, h, s, q0, q1);
          for (i32 k0 = keys.begin * C.tile_k; k0 < min(keys.end * C.tile_k, seqlen_k); k0 += C.tile_k) {
            const i32 k1 = min(k0 + C.tile_k, seqlen_k);
            if (k1 <= any.begin || k0 >= any.end || !block_kept(in, b, h, q0, k0)) continue;
            if constexpr (C.features.dropout) __syncthreads(); // what was kept of the last tile has been asked
            recompute<C>(multiply, scores, dropout, kept, rows, P, dS, Q, K, dO, V, h, q0, q1, k0, k1, k0 < all.begin || k1 > all.end,
                         [](T &, T &ds, T, bool, T gradient, T) { ds = gradient; });
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
              for (int j = 0; j < kKeys; ++j) add(sum[i][j], lost[i][j], dS[place(grid, i, j)]);
          }
        }
      }
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kKeys; ++j) whole[place(grid, i, j)] = sum[i][j];
    __syncthreads();
    const i32 t = (i32)threadIdx.x;
    if (!stride[2]) total(whole, t, C.tile_k, 1, C.tile_q, C.p_stride());
    if (!stride[3]) total(whole, t, stride[2] ? C.tile_q : 1, C.p_stride(), C.tile_k, 1);

    const i32 q0 = queries.begin * C.tile_q, k0 = keys.begin * C.tile_k;
    const i32 nq = stride[2] ? (i32)min((i64)C.tile_q, in.seqlen_q - q0) : 1,
              nk = stride[3] ? (i32)min((i64)C.tile_k, in.seqlen_k - k0) : 1;
    for (i32 i = t; i < nq * C.tile_k; i += kThreads) {
      const i32 r = i / C.tile_k, c = i % C.tile_k;
      if (c < nk) *a.dbias.template at<B>(batches.begin, heads.begin, q0 + r, k0 + c) = Convert<B>::from(whole[r * C.p_stride() + c]);
    }
  }

private:
  // Where recompute has the same thread leave its element (i, j).
  static __device__ __forceinline__ i32 place(const typename Multiply::Grid &grid, int i, int j) {
    return grid.template row<piece<T>(kRows)>(i) * C.p_stride() + grid.template column<piece<T>(kKeys)>(j);
  }
  struct Part {
    i32 begin, end;
    __device__ Part(u32 &item, i64 stride, i64 count) {
      begin = stride ? (i32)(item % (u32)count) : 0;
      end = stride ? begin + 1 : (i32)count;
      if (stride) item /= (u32)count;
    }
  };
  static __device__ bool block_kept(const Inputs &in, i64 b, i64 h, i32 q0, i32 k0) {
    if constexpr (!C.features.blocks) return true;
    return in.blocks.row(b, h, q0 / in.blocks.row_tokens).keeps(k0);
  }
  // x[i * step] += x[i * step + n * other_step] for n in [1, count)
  static __device__ void total(T *x, i32 t, i32 lines, i32 step, i32 count, i32 other_step) {
    for (i32 i = t; i < lines; i += kThreads) {
      T sum = T(0), lost = T(0);
      for (i32 n = 0; n < count; ++n) add(sum, lost, x[i * step + n * other_step]);
      x[i * step] = sum;
    }
    __syncthreads();
  }
};

} // namespace strobe::simt
