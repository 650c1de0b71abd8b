// Gradients of captured tensors on tensor cores (device/captured.h): what is summed of the pairs.
#pragma once
#include "../device/captured.h"
#include "../device/tile_gradient.h"

namespace strobe::passes {

template <CapturedTileConfig C> struct Captured {
  using Arguments = CapturedArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Block block(a, shared);
    const u32 pairs = (u32)(a.in.batch * a.in.heads);
    if constexpr (C.summed == kRows) {
      const u32 tiles = (u32)div_up(a.in.seqlen_q, C.tile_q);
      block.sum_rows(blockIdx.x / tiles, (i32)(tiles - 1 - blockIdx.x % tiles)); // under a causal mask the last tile sees the most keys
    } else if constexpr (C.summed == kColumns) {
      const u32 tiles = (u32)div_up(a.in.seqlen_k, C.tile_k);
      block.sum_columns(blockIdx.x / tiles, (i32)(blockIdx.x % tiles));
    } else if constexpr (C.summed == kDiagonals) {
      const Diagonals diagonals(a.in, C.tile_q);
      block.sum_diagonals(blockIdx.x / (u32)diagonals.count(), (i32)(blockIdx.x % (u32)diagonals.count()), diagonals);
    } else if constexpr (C.summed == kTable) {
      block.sum_table(pairs);
    } else {
      const u32 tiles = (u32)div_up(a.in.seqlen_q, C.tile_q);
      block.take_pairs(blockIdx.x / tiles, (i32)(tiles - 1 - blockIdx.x % tiles));
    }
  }

private:
  static constexpr TileConfig kTile = C;
  static constexpr Features F = C.features;
  using Gradient = TileGradient<kTile>;
  using Tile = typename Gradient::Tile;
  using Values = PairValues<F, Gradient::kFunctions, C.loads, float>;
  static constexpr int kKeys = Gradient::kKeys, kQueries = Gradient::kQueries, kCount = count_loads(C.loads);
  static constexpr int kElements = 8 * kKeys * kQueries; // of a thread
  static constexpr bool kExact = C.dtype == kF32;        // sums keep their rounding errors; in 16 bits the rounding of dS is larger

  struct Sum {
    float sum = 0, lost = 0;
    __device__ __forceinline__ void add(float x) {
      if constexpr (kExact)
        strobe::add(sum, lost, x);
      else
        sum += x;
    }
  };
  // Where a thread's element n of a tile lies.
  struct Element {
    int m, n, c, r, e;
    __device__ __forceinline__ explicit Element(int k) : m(k / (8 * kQueries)), n(k / 8 % kQueries), c(k / 4 % 2), r(k / 2 % 2), e(k % 2) {}
    __device__ __forceinline__ float of(const Tile &x) const { return x[m][n].x[c][2 * r + e]; }
    __device__ __forceinline__ int query() const { return 4 * n + 2 * c + e; } // among this thread's
    __device__ __forceinline__ int key() const { return 2 * m + r; }
  };

  struct Block {
    const Arguments &a;
    const Inputs &in;
    const Gradient gradient;
    unsigned char *const memory;
    const i32 t;

    __device__ __forceinline__ Block(const Arguments &a, unsigned char *shared)
        : a(a), in(a.in), gradient(a, shared), memory(shared), t((i32)threadIdx.x) {}

    // The positions of a thread's element in a tile.
    __device__ __forceinline__ i32 query_of(const Element &x) const {
      return (gradient.query_warp * kQueries + x.n) * 16 + tile::lane_column(x.c, x.e);
    }
    __device__ __forceinline__ i32 key_of(const Element &x) const { return (gradient.key_warp * kKeys + x.m) * 16 + tile::lane_row(x.r); }
    // Computes a tile and calls use(element, values) for each of this thread's elements; returns whether some query sees some key.
    template <class Use>
    __device__ __forceinline__ bool each(const Sequence &s, const typename Gradient::Place &place, bool keys, bool queries,
                                         const Use &use) const {
      Tile P, dS, raw;
      if (!gradient.template compute<true>(P, dS, raw, s, place, keys, queries, rows())) return false;
      each_of(dS, raw, s, place, use);
      return true;
    }
    template <class Use>
    __device__ __forceinline__ void each_of(const Tile &dS, const Tile &raw, const Sequence &s, const typename Gradient::Place &place,
                                            const Use &use) const {
      const Scores<F, float, Gradient::kFunctions> scores(in, s, place.batch);
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        const Element x(k);
        const auto row = scores.row(place.q0 + query_of(x), place.head);
        use(x, Values(in.function, scores.pair(row, place.k0 + key_of(x)), x.of(raw) * scores.scale, x.of(dS)));
      }
    }
    // Stores the sum of a line of a load, and raises its tensor's largest value. All threads take part; those without a line have a null.
    template <int kLoad> __device__ __forceinline__ void put(i32 lines, i64 line, float sum, bool has_line) const {
      if (has_line) ((float *)a.lines[lines])[rank_of_load(C.of_lines, kLoad) * a.count[lines] + line] = sum;
      raise_by_warp(a.largest + Values::Of::captured_of(kLoad), has_line ? size_bits(sum) : 0);
    }
    __device__ __forceinline__ float *floats() const { return (float *)memory; }
    __device__ __forceinline__ float *rows() const { return (float *)(memory + C.operand_bytes()); }
    // Calls use(k0) for the tiles of keys that queries [q0, q1) may see.
    template <class Use> __device__ __forceinline__ void walk_keys(const Band &band, i32 q0, i32 q1, const Use &use) const {
      const Range seen = intersect(band.keys_any(q0, q1), {0, band.seqlen_k});
      for (i64 k0 = round_down(seen.begin, C.tile_k); k0 < seen.end; k0 += C.tile_k) use((i32)k0);
    }

    __device__ __forceinline__ void sum_rows(u32 pair, i32 tile) const {
      const i32 b = (i32)(pair / in.heads), h = (i32)(pair % in.heads), q0 = tile * C.tile_q;
      const Sequence s = in.sequence<F>(b);
      if (q0 >= s.band.seqlen_q) return;
      const i32 q1 = (i32)min((i64)q0 + C.tile_q, s.band.seqlen_q);
      Sum sums[kCount][4 * kQueries];
      bool loaded = false;
      walk_keys(s.band, q0, q1, [&](i32 k0) {
        loaded |= each(s, {b, h, q0, k0}, true, !loaded, [&](const Element &x, const Values &values) {
          each_load<C.loads>([&](auto load) {
            constexpr int kLoad = decltype(load)::kNumber;
            sums[rank_of_load(C.loads, kLoad)][x.query()].add(values.template value<kLoad>());
          });
        });
      });
      each_load<C.loads>([&](auto load) {
        constexpr int kLoad = decltype(load)::kNumber;
        __syncthreads(); // all threads have read what lies there
#pragma unroll
        for (int k = 0; k < 4 * kQueries; ++k) {
          float sum = sums[rank_of_load(C.loads, kLoad)][k].sum;
#pragma unroll
          for (int n = 4; n < 32; n *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, n);
          const i32 query = (gradient.query_warp * kQueries + k / 4) * 16 + tile::lane_column(k / 2 % 2, k % 2);
          if (tile::lane_row(0) == 0) floats()[gradient.key_warp * C.tile_q + query] = sum;
        }
        __syncthreads();
        float sum = 0;
        if (t < C.tile_q)
          for (int w = 0; w < C.key_warps; ++w) sum += floats()[w * C.tile_q + t];
        put<kLoad>(kRows, in.row_index(b, h, s.q0 + q0 + t), sum, t < q1 - q0);
      });
    }

    __device__ __forceinline__ void sum_columns(u32 pair, i32 tile) const {
      const i32 b = (i32)(pair / in.heads), h = (i32)(pair % in.heads), k0 = tile * C.tile_k;
      const Sequence s = in.sequence<F>(b);
      if (k0 >= s.band.seqlen_k) return;
      const i32 k1 = (i32)min((i64)k0 + C.tile_k, s.band.seqlen_k);
      Sum sums[kCount][2 * kKeys];
      bool loaded = false;
      const Range seen = intersect(s.band.transposed().keys_any(k0, k1), {0, s.band.seqlen_q});
      for (i64 q0 = round_down(seen.begin, C.tile_q); q0 < seen.end; q0 += C.tile_q) {
        loaded |= each(s, {b, h, (i32)q0, k0}, !loaded, true, [&](const Element &x, const Values &values) {
          each_load<C.loads>([&](auto load) {
            constexpr int kLoad = decltype(load)::kNumber;
            sums[rank_of_load(C.loads, kLoad)][x.key()].add(values.template value<kLoad>());
          });
        });
      }
      each_load<C.loads>([&](auto load) {
        constexpr int kLoad = decltype(load)::kNumber;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 2 * kKeys; ++k) {
          const float sum = tile::row_sum(sums[rank_of_load(C.loads, kLoad)][k].sum);
          const i32 key = (gradient.key_warp * kKeys + k / 2) * 16 + tile::lane_row(k % 2);
          if (tile::lane_column(0, 0) == 0) floats()[gradient.query_warp * C.tile_k + key] = sum;
        }
        __syncthreads();
        float sum = 0;
        if (t < C.tile_k)
          for (int w = 0; w < C.query_warps; ++w) sum += floats()[w * C.tile_k + t];
        put<kLoad>(kColumns, column_index(in, b, h, s.k0 + k0 + t), sum, t < k1 - k0);
      });
    }

    // A thread adds up some keys of two diagonals: with i - j = c and with c - tile, which together have one query for each key.
    __device__ __forceinline__ void sum_diagonals(u32 pair, i32 of_tiles, const Diagonals &diagonals) const {
      if constexpr (C.summed == kDiagonals) {
        static_assert(C.tile_q == C.tile_k && kThreads % C.tile_q == 0);
        constexpr i32 kSide = C.tile_q, kParts = kThreads / kSide, kOwn = kSide / kParts;
        const i32 b = (i32)(pair / in.heads), h = (i32)(pair % in.heads), difference = diagonals.difference(of_tiles);
        const Sequence s = in.sequence<F>(b);
        const i32 c = t % kSide, part = t / kSide;
        Sum above[kCount], below[kCount];
        for (i32 k0 = max(0, -difference); k0 < s.band.seqlen_k && k0 + difference < s.band.seqlen_q; k0 += kSide) {
          const typename Gradient::Place place{b, h, k0 + difference, k0};
          Tile P, dS, raw;
          if (!gradient.template compute<true>(P, dS, raw, s, place, true, true, rows())) continue;
          each_load<C.loads>([&](auto load) {
            constexpr int kLoad = decltype(load)::kNumber, kRank = rank_of_load(C.loads, kLoad);
            __syncthreads();
            each_of(dS, raw, s, place, [&](const Element &x, const Values &values) {
              const i32 i = query_of(x), j = key_of(x);
              floats()[j * C.values_pitch() + ((i - j) & (kSide - 1))] = values.template value<kLoad>();
            });
            __syncthreads();
#pragma unroll 8
            for (i32 n = 0; n < kOwn; ++n) {
              const i32 j = part * kOwn + n;
              const float x = floats()[j * C.values_pitch() + c];
              if (c + j < kSide)
                above[kRank].add(x);
              else
                below[kRank].add(x);
            }
          });
        }
        each_load<C.loads>([&](auto load) {
          constexpr int kLoad = decltype(load)::kNumber, kRank = rank_of_load(C.loads, kLoad);
          static_assert(2 * kSide <= kThreads);
          __syncthreads();
          floats()[part * 2 * kSide + kSide + c] = above[kRank].sum, floats()[part * 2 * kSide + c] = below[kRank].sum;
          __syncthreads();
          float sum = 0;
          if (t < 2 * kSide)
            for (i32 n = 0; n < kParts; ++n) sum += floats()[n * 2 * kSide + t];
          put<kLoad>(kDiagonals, diagonals.line(in, b, h, of_tiles, t), sum, t < 2 * kSide);
        });
      }
    }

    // The largest bits of all threads.
    __device__ __forceinline__ u32 largest_of_block(u32 x, u32 *of_warps) const {
#pragma unroll
      for (int n = 16; n; n /= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, n));
      __syncthreads();
      if (t % 32 == 0) of_warps[t / 32] = x;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) x = max(x, of_warps[w]);
      return x;
    }

    // Small tensors: the values of a tile are added up in shared memory as integers, in fixed point by the largest of them, which then go
    // to floating-point sums, tile by tile in a fixed order. A block takes the tiles of queries block, block + blocks and so on.
    __device__ __forceinline__ void sum_table(u32 pairs) const {
      using Real = typename Either<kExact, double, float>::type;
      u32 *const of_warps = (u32 *)(memory + C.operand_bytes() + C.row_bytes());
      i32 *const cells = (i32 *)(of_warps + C.kWarpBytes / 4);
      Real *const sums = (Real *)(cells + C.cells());
      for (i32 n = t; n < C.cells(); n += kThreads) cells[n] = 0;
      for (i32 n = t; n < a.table_elements; n += kThreads) sums[n] = 0;
      const u32 tiles = (u32)div_up(in.seqlen_q, C.tile_q);
      for (u32 item = blockIdx.x; item < pairs * tiles; item += (u32)a.table_blocks) {
        const i32 pair = (i32)(item / tiles), b = pair / in.heads, h = pair % in.heads;
        const i32 q0 = (i32)(tiles - 1 - item % tiles) * C.tile_q;
        const Sequence s = in.sequence<F>(b);
        if (q0 >= s.band.seqlen_q) continue;
        bool loaded = false;
        walk_keys(s.band, q0, (i32)min((i64)q0 + C.tile_q, s.band.seqlen_q), [&](i32 k0) {
          const typename Gradient::Place place{b, h, q0, k0};
          Tile P, dS, raw;
          if (!gradient.template compute<true>(P, dS, raw, s, place, true, !loaded, rows())) return;
          loaded = true;
          each_load<C.loads>([&](auto load) { add_to_table<decltype(load)::kNumber>(dS, raw, s, place, cells, sums, of_warps); });
        });
      }
      __syncthreads();
      Real *const table = (Real *)a.tables + (i64)blockIdx.x * a.table_elements;
      for (i32 n = t; n < a.table_elements; n += kThreads) table[n] = sums[n];
    }
    template <int kLoad, class Real>
    __device__ __forceinline__ void add_to_table(const Tile &dS, const Tile &raw, const Sequence &s, const typename Gradient::Place &place,
                                                 i32 *cells, Real *sums, u32 *of_warps) const {
      const CapturedGradient &g = a.gradients[Values::Of::captured_of(kLoad)];
      u32 most = 0;
      each_of(dS, raw, s, place, [&](const Element &, const Values &values) {
        most = max(most, __float_as_uint(values.template value<kLoad>()) & 0x7FFFFFFF);
      });
      most = largest_of_block(most, of_warps); // after this, too, the cells are 0 for all threads
      if (most == 0) return;
      const i32 exponent = (i32)(most >> 23) - 126; // all values are below 2^exponent
      if (exponent > 128) {                         // not finite
        if (t == 0) raise_to(a.largest + Values::Of::captured_of(kLoad), 0x7FFull << 52);
        return;
      }
      // A cell takes 2^bits values at most, since lanes of different numbers use different copies.
      const i32 copies = 1 << g.table_copies, bits = log2_of(C.tile_q * C.tile_k) - g.table_copies;
      const i32 k = min(30 - bits - exponent, 126);
      const float unit = __uint_as_float((u32)(127 + k) << 23), inverse = __uint_as_float((u32)(127 - k) << 23);
      const u32 own = shared_address(cells + t % copies);
      each_of(dS, raw, s, place, [&](const Element &, const Values &values) {
        const float x = values.template value<kLoad>() * unit;
        if (x == 0) return;
        const u32 cell = own + (u32)(4 << g.table_copies) * (u32)values.template element<kLoad>(in.function, g);
        const i32 whole = __float2int_rn(x);
        add_shared(cell, whole);
        if constexpr (kExact) add_shared(cell + 4 * kTableCells, __float2int_rn((x - (float)whole) * (float)(1 << fine(bits))));
      });
      __syncthreads();
      for (i32 n = t; n < g.count; n += kThreads) {
        i64 whole = 0, rest = 0;
#pragma unroll 1
        for (i32 copy = 0; copy < copies; ++copy) {
          i32 &cell = cells[n * copies + ((n * copies / 32 + copy) & (copies - 1))]; // lanes use different banks
          whole += cell, cell = 0;
          if constexpr (kExact) rest += (&cell)[kTableCells], (&cell)[kTableCells] = 0;
        }
        if constexpr (kExact)
          sums[g.table + n] += ((double)whole + (double)rest / (double)(1 << fine(bits))) * inverse;
        else
          sums[g.table + n] += (float)whole * inverse;
      }
    }
    // The bits of the second integer: 2^bits values of at most half its unit may be added.
    static __device__ __forceinline__ i32 fine(i32 bits) { return 30 - bits; }
    static __device__ constexpr i32 log2_of(i32 x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }
    static __device__ __forceinline__ void add_shared(u32 address, i32 x) {
#if __CUDA_ARCH__ >= 700
      asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
#else
      asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
#endif
    }

    // Each pair by itself: the largest value, or all values to the elements' sums.
    __device__ __forceinline__ void take_pairs(u32 pair, i32 tile) const {
      const i32 b = (i32)(pair / in.heads), h = (i32)(pair % in.heads), q0 = tile * C.tile_q;
      const Sequence s = in.sequence<F>(b);
      if (q0 >= s.band.seqlen_q) return;
      float most[kCount] = {};
      bool loaded = false;
      walk_keys(s.band, q0, (i32)min((i64)q0 + C.tile_q, s.band.seqlen_q), [&](i32 k0) {
        loaded |= each(s, {b, h, q0, k0}, true, !loaded, [&](const Element &, const Values &values) {
          each_load<C.loads>([&](auto load) {
            constexpr int kLoad = decltype(load)::kNumber, kTensor = Values::Of::captured_of(kLoad);
            const float x = values.template value<kLoad>();
            if constexpr (C.summed == kLargest) {
              float &own = most[rank_of_load(C.loads, kLoad)];
              own = fabsf(x) > own || x != x ? fabsf(x) : own; // a NaN stays: nothing exceeds it
            } else if (x != 0) {
              const CapturedGradient &g = a.gradients[kTensor];
              const u64 largest = a.largest[kTensor];
              if (is_number(largest))
                add_to(a, g.first + values.template element<kLoad>(in.function, g),
                       Fixed<float>(x, fixed_exponent<float>(largest, g.log2_values), g.log2_values));
            }
          });
        });
      });
      if constexpr (C.summed == kLargest)
        each_load<C.loads>([&](auto load) {
          constexpr int kLoad = decltype(load)::kNumber;
          raise_by_warp(a.largest + Values::Of::captured_of(kLoad), size_bits(most[rank_of_load(C.loads, kLoad)]));
        });
    }
  };
};

} // namespace strobe::passes
