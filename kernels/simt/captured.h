// Gradients of captured tensors with plain FMA (device/captured.h). A tile of q.k and dS lies in shared memory, and a thread adds up a line
// of it. In a part, and for elements that follow no lines, threads take the pairs one by one.
#pragma once
#include "../device/bias_gradient.h" // columns_of
#include "../device/captured.h"
#include "captured_config.h"
#include "tile_gradient.h"

namespace strobe::simt {

template <CapturedConfig C> struct Captured {
  using Arguments = CapturedArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    Block block(a, shared);
    if constexpr (C.summed == kRows)
      block.sum_rows();
    else if constexpr (C.summed == kColumns)
      block.sum_columns();
    else if constexpr (C.summed == kDiagonals)
      block.sum_diagonals();
    else
      block.take_pairs();
  }

private:
  static constexpr Config kConfig = C;
  static constexpr Features F = C.features;
  using Gradient = TileGradient<kConfig>;
  using T = typename Gradient::T;
  using Values = PairValues<F, Functions::full, C.loads, T>;
  using HeadScores = Scores<F, T>;
  static constexpr int kCount = C.loads.count();
  static_assert(C.summed != kTable && (!F.part || C.summed >= kLargest));

  struct Sum {
    T sum = T(0), lost = T(0);
    __device__ __forceinline__ void add(T x) { strobe::add(sum, lost, x); }
  };

  struct Block {
    const Arguments &a;
    const Inputs &in;
    Gradient gradient;
    const i32 t;
    i32 b, h;

    __device__ __forceinline__ Block(const Arguments &a, unsigned char *shared)
        : a(a), in(a.in), gradient(a, shared), t((i32)threadIdx.x) {}

    // Takes the block's number apart: returns the tile; sets b and h.
    __device__ __forceinline__ i32 take(u32 tiles) {
      const u32 pair = blockIdx.x / tiles;
      b = (i32)(pair / in.heads), h = (i32)(pair % in.heads);
      return (i32)(blockIdx.x % tiles);
    }
    // The values of a pair of the tile, whose first query and key are q0 and k0.
    __device__ __forceinline__ Values values(const HeadScores &scores, i32 q0, i32 k0, i32 i, i32 j) const {
      const i32 place = i * C.p_stride() + j;
      return Values(in.function, scores.pair(scores.row(q0 + i, h), k0 + j), gradient.P[place] * scores.scale, gradient.dS[place]);
    }
    // Adds a pair's values to the sums.
    __device__ __forceinline__ void add(Sum (&sums)[kCount], const HeadScores &scores, i32 q0, i32 k0, i32 i, i32 j) const {
      const Values pair = values(scores, q0, k0, i, j);
      each_load<C.loads>([&](auto load) {
        constexpr int kLoad = decltype(load)::kNumber;
        sums[C.loads.rank(kLoad)].add(pair.template value<kLoad>());
      });
    }
    // Stores this thread's sums, of a line.
    __device__ __forceinline__ void put(i32 lines, i64 line, const Sum (&sums)[kCount], bool has_line) const {
      each_load<C.loads>([&](auto load) {
        constexpr int kLoad = decltype(load)::kNumber, kRank = C.loads.rank(kLoad);
        const T sum = sums[kRank].sum;
        if (has_line) ((T *)a.lines[lines])[C.of_lines.rank(kLoad) * a.count[lines] + line] = sum;
        raise_by_warp(a.largest + Values::Of::captured_of(kLoad), has_line ? finite_size(sum) : 0);
      });
    }
    // Calls use(scores) for a tile, between barriers, so that all threads may read all of it.
    template <class Use> __device__ __forceinline__ void compute(i32 k0, const Use &use) {
      gradient.compute(k0, [&](const HeadScores &scores, i32 first) {
        __syncthreads();
        use(scores, first);
        __syncthreads();
      });
    }

    __device__ __forceinline__ void sum_rows() {
      const i32 q0 = take((u32)div_up(in.seqlen_q, C.tile_q)) * C.tile_q;
      if (!gradient.take_queries(b, h, q0)) return;
      const Sequence s = in.sequence<F>(b);
      Sum sums[kCount];
      for (i32 k0 = 0; k0 < s.band.seqlen_k; k0 += C.tile_k)
        compute(k0, [&](const HeadScores &scores, i32) {
          if (t < C.tile_q)
            for (i32 j = 0; j < C.tile_k; ++j) add(sums, scores, q0, k0, t, j);
        });
      put(kRows, in.row_index(b, h, s.q0 + q0 + t), sums, q0 + t < gradient.q1);
    }
    __device__ __forceinline__ void sum_columns() {
      const i32 k0 = take((u32)div_up(in.seqlen_k, C.tile_k)) * C.tile_k;
      const Sequence s = in.sequence<F>(b);
      if (k0 >= s.band.seqlen_k) return;
      Sum sums[kCount];
      for (i32 q0 = 0; q0 < s.band.seqlen_q; q0 += C.tile_q) {
        if (!gradient.take_queries(b, h, q0)) break;
        compute(k0, [&](const HeadScores &scores, i32) {
          if (t < C.tile_k)
            for (i32 i = 0; i < C.tile_q; ++i) add(sums, scores, q0, k0, i, t);
        });
      }
      put(kColumns, column_index(in, b, h, s.k0 + k0 + t), sums, t < C.tile_k && k0 + t < s.band.seqlen_k);
    }
    __device__ __forceinline__ void sum_diagonals() {
      static_assert(C.summed != kDiagonals || (C.tile_q == C.tile_k && 2 * C.tile_q <= kThreads));
      constexpr i32 kSide = C.tile_q;
      const Diagonals diagonals(in, kSide);
      const i32 of_tiles = take((u32)diagonals.count()), difference = diagonals.difference(of_tiles);
      const Sequence s = in.sequence<F>(b);
      const i32 own = t - kSide; // i - j within a tile
      Sum sums[kCount];
      for (i32 k0 = max(0, -difference); k0 < s.band.seqlen_k && k0 + difference < s.band.seqlen_q; k0 += kSide) {
        const i32 q0 = k0 + difference;
        if (!gradient.take_queries(b, h, q0)) break;
        compute(k0, [&](const HeadScores &scores, i32) {
          for (i32 j = max(0, -own); j < min(kSide, kSide - own); ++j) add(sums, scores, q0, k0, j + own, j);
        });
      }
      put(kDiagonals, diagonals.line(in, b, h, of_tiles, t), sums, t < 2 * kSide);
    }
    __device__ __forceinline__ void take_pairs() {
      const i32 q0 = take((u32)div_up(in.seqlen_q, C.tile_q)) * C.tile_q;
      if (!gradient.take_queries(b, h, q0)) return;
      u64 most[kCount] = {};
      for (i32 k0 = 0; k0 < columns_of<Gradient::of_part()>(in); k0 += C.tile_k)
        compute(k0, [&](const HeadScores &scores, i32 first) {
          for (i32 n = t; n < C.tile_q * C.tile_k; n += kThreads) {
            const Values pair = values(scores, first, k0, n / C.tile_k, n % C.tile_k);
            each_load<C.loads>([&](auto load) {
              constexpr int kLoad = decltype(load)::kNumber, kTensor = Values::Of::captured_of(kLoad);
              const T x = pair.template value<kLoad>();
              if constexpr (C.summed == kLargest) {
                u64 &own = most[C.loads.rank(kLoad)];
                own = max(own, finite_size(x));
              } else if (x != T(0)) {
                const CapturedGradient &g = a.gradients[kTensor];
                add_pair(a, g, g.first + pair.template element<kLoad>(in.function, g), a.largest[kTensor], x);
              }
            });
          }
        });
      if constexpr (C.summed == kLargest)
        each_load<C.loads>([&](auto load) {
          constexpr int kLoad = decltype(load)::kNumber;
          raise_by_warp(a.largest + Values::Of::captured_of(kLoad), most[C.loads.rank(kLoad)]);
        });
    }
  };
};

} // namespace strobe::simt
