// Gradients of captured tensors on tensor cores (device/captured.h): what is summed of the pairs.
#pragma once
#include "../device/captured.h"
#include "../device/captured_walk.h"

namespace strobe::passes {

template <CapturedTileConfig C> struct Captured {
  using Arguments = CapturedArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Block block(a, shared);
    const u32 pairs = (u32)(a.in.batch * a.in.heads);
    if constexpr (C.summed == kRows) {
      block.sum_rows();
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
  using Gradient = TileWalk<kTile, C.summed == kColumns ? WalkAlong::queries : C.summed == kDiagonals ? WalkAlong::both : WalkAlong::keys>;
  using Tile = typename Gradient::Tile;
  using Place = typename Gradient::Place;
  using Values = PairValues<F, Gradient::kFunctions, C.loads, float>;
  static constexpr int kKeys = Gradient::kKeys, kQueries = Gradient::kQueries, kCount = C.loads.count();
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
    template <class T> __device__ __forceinline__ auto &of(T &x) const { return x[m][n].x[c][2 * r + e]; }
    __device__ __forceinline__ int query() const { return 4 * n + 2 * c + e; } // among this thread's
    __device__ __forceinline__ int key() const { return 2 * m + r; }
    __device__ __forceinline__ int diagonal() const { return 2 * (2 * n + c - (2 * m + r) + 2 * kKeys - 1) + e; }
  };

  struct Block {
    const Arguments &a;
    const Inputs &in;
    const Gradient gradient;
    unsigned char *const memory;
    const i32 t;

    __device__ __forceinline__ Block(const Arguments &a, unsigned char *shared)
        : a(a), in(a.in), gradient(a, shared, (float *)(shared + C.operand_bytes())), memory(shared), t((i32)threadIdx.x) {}

    // The positions of a thread's element in a tile.
    __device__ __forceinline__ i32 query_of(const Element &x) const {
      return (gradient.query_warp * kQueries + x.n) * 16 + tile::lane_column(x.c, x.e);
    }
    __device__ __forceinline__ i32 key_of(const Element &x) const { return (gradient.key_warp * kKeys + x.m) * 16 + tile::lane_row(x.r); }
    // Calls use(element, values) for each of this thread's elements of a tile.
    template <class Use>
    __device__ __forceinline__ void each_of(const Tile &dS, const Tile &raw, const Sequence &s, const Place &place, const Use &use) const {
      const Scores<F, float, Gradient::kFunctions> scores(in, s, place.batch);
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        const Element x(k);
        const auto row = scores.row(place.q0 + query_of(x), place.head);
        use(x, Values(in.function, scores.pair(row, place.k0 + key_of(x)), x.of(raw) * scores.scale, x.of(dS)));
      }
    }
    // Walks from a tile on; calls use for each element of each tile.
    template <class Use>
    __device__ __forceinline__ void each(const Sequence &s, const Place &first, i64 queries_end, i64 keys_end, const Use &use) const {
      Tile raw, dS;
      gradient.template run<false>(
          raw, dS, s, first, queries_end, keys_end, [] {}, [&](const Place &place) { each_of(dS, raw, s, place, use); });
    }
    // Adds a pair's values to sums[load][n].
    template <int kSums> static __device__ __forceinline__ void add(Sum (&sums)[kCount][kSums], int n, const Values &values) {
      each_load<C.loads>([&](auto load) {
        constexpr int kLoad = decltype(load)::kNumber;
        sums[C.loads.rank(kLoad)][n].add(values.template value<kLoad>());
      });
    }
    // Stores the sum of a line of a load, and raises its tensor's largest value. All threads take part; those without a line have a null.
    template <int kLoad> __device__ __forceinline__ void put(i32 lines, i64 line, float sum, bool has_line) const {
      if (has_line) ((float *)a.lines[lines])[C.of_lines.rank(kLoad) * a.count[lines] + line] = sum;
      raise_by_warp(a.largest + Values::Of::captured_of(kLoad), has_line ? finite_size(sum) : 0);
    }
    __device__ __forceinline__ float *floats() const { return (float *)memory; }
    // The tiles of keys that the queries [q0, q1) see: from the first to the end.
    static __device__ __forceinline__ Range keys_of(const Band &band, i32 q0, i32 q1) {
      const Range seen = intersect(band.keys_any(q0, q1), {0, band.seqlen_k});
      return seen.empty() ? Range{0, 0} : Range{round_down(seen.begin, C.tile_k), seen.end};
    }

    // The queries [q0, q1) of a tile. Under a causal mask the last ones see the most keys.
    struct Queries {
      i32 b, h, q0, q1;
      Sequence s;
      __device__ __forceinline__ Queries(const Inputs &in, u32 n) {
        const u32 tiles = (u32)div_up(in.seqlen_q, C.tile_q), pair = n / tiles;
        b = (i32)(pair / (u32)in.heads), h = (i32)(pair % (u32)in.heads), q0 = (i32)(tiles - 1 - n % tiles) * C.tile_q;
        s = in.sequence<F>(b);
        q1 = (i32)min((i64)q0 + C.tile_q, s.band.seqlen_q);
      }
    };
    __device__ __forceinline__ void sum_rows() const {
      Sum sums[kCount][4 * kQueries];
      {
        const Queries own(in, blockIdx.x);
        if (own.q0 >= own.q1) return;
        const Range keys = keys_of(own.s.band, own.q0, own.q1);
        each(own.s, {own.b, own.h, own.q0, (i32)keys.begin}, own.q1, keys.end,
             [&](const Element &x, const Values &values) { add(sums, x.query(), values); });
      }
      const Queries own(in, (u32)computed_here((int)blockIdx.x)); // registers are scarce
      each_load<C.loads>([&](auto load) {
        constexpr int kLoad = decltype(load)::kNumber;
        __syncthreads(); // all threads have read what lies there
#pragma unroll
        for (int k = 0; k < 4 * kQueries; ++k) {
          float sum = sums[C.loads.rank(kLoad)][k].sum;
#pragma unroll
          for (int n = 4; n < 32; n *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, n);
          const i32 query = (gradient.query_warp * kQueries + k / 4) * 16 + tile::lane_column(k / 2 % 2, k % 2);
          if (tile::lane_row(0) == 0) floats()[gradient.key_warp * C.tile_q + query] = sum;
        }
        __syncthreads();
        float sum = 0;
        if (t < C.tile_q)
          for (int w = 0; w < C.key_warps; ++w) sum += floats()[w * C.tile_q + t];
        put<kLoad>(kRows, in.row_index(own.b, own.h, own.s.q0 + own.q0 + t), sum, t < own.q1 - own.q0);
      });
    }

    __device__ __forceinline__ void sum_columns(u32 pair, i32 tile) const {
      const i32 b = (i32)(pair / in.heads), h = (i32)(pair % in.heads), k0 = tile * C.tile_k;
      const Sequence s = in.sequence<F>(b);
      if (k0 >= s.band.seqlen_k) return;
      const i32 k1 = (i32)min((i64)k0 + C.tile_k, s.band.seqlen_k);
      Sum sums[kCount][2 * kKeys];
      Range seen = intersect(s.band.transposed().keys_any(k0, k1), {0, s.band.seqlen_q});
      if (seen.empty()) seen = {0, 0};
      each(s, {b, h, (i32)round_down(seen.begin, C.tile_q), k0}, seen.end, k1,
           [&](const Element &x, const Values &values) { add(sums, x.key(), values); });
      each_load<C.loads>([&](auto load) {
        constexpr int kLoad = decltype(load)::kNumber;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 2 * kKeys; ++k) {
          const float sum = tile::row_sum(sums[C.loads.rank(kLoad)][k].sum);
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

    __device__ __forceinline__ void sum_diagonals(u32 pair, i32 of_tiles, const Diagonals &diagonals) const {
      if constexpr (C.summed == kDiagonals) {
        constexpr i32 kSide = C.tile_q, kOwn = C.thread_diagonals(), kWarps = kThreads / 32;
        static_assert(C.tile_q == C.tile_k && 2 * kSide <= kThreads);
        const i32 b = (i32)(pair / in.heads), h = (i32)(pair % in.heads), difference = diagonals.difference(of_tiles);
        const Sequence s = in.sequence<F>(b);
        const i32 k0 = max(0, -difference);
        Sum sums[kCount][kOwn];
        each(s, {b, h, k0 + difference, k0}, s.band.seqlen_q, s.band.seqlen_k,
             [&](const Element &x, const Values &values) { add(sums, x.diagonal(), values); });
        each_load<C.loads>([&](auto load) {
          constexpr int kLoad = decltype(load)::kNumber;
          __syncthreads();
#pragma unroll
          for (int n = 0; n < kOwn; ++n) floats()[n * kThreads + t] = sums[C.loads.rank(kLoad)][n].sum;
          __syncthreads();
          float sum =
              0; // of the diagonal t - kSide of the tiles; of each 8 lanes whose keys differ by 1, two queries of one lane are on it
          if (t < 2 * kSide)
            for (i32 w = 0; w < kWarps; ++w) {
              const i32 query = w / C.key_warps * kQueries * 16, key = w % C.key_warps * kKeys * 16;
              for (i32 row = 0; row < 8; ++row) {
                const i32 n = t - kSide - (query - key) + row + 8 * (2 * kKeys - 1); // that of the lane's queries, 8 of each sum
                if (n >= 0 && n < 4 * kOwn) sum += floats()[(n / 8 * 2 + n % 2) * kThreads + 32 * w + 4 * row + n % 8 / 2];
              }
            }
          put<kLoad>(kDiagonals, diagonals.line(in, b, h, of_tiles, t), sum, t < 2 * kSide);
        });
      }
    }

    // Tables: a tile's values are added up in shared memory as integers, in fixed point. When a cell might overflow, or the unit does not
    // suit a tile, the cells go to floating-point sums. A block takes the tiles of queries block, block + blocks and so on. Loads of one
    // tensor share its cells, and have the unit in the place of the first of them.
    struct Cells {
      i32 exponent = 0; // an integer counts 2^-exponent
      u64 used = 0;     // no cell is larger
    };
    struct Table {
      using Real = typename Either<kExact, double, float>::type;
      u32 *largest; // of a tile's values: (load, warp)
      i32 *cells;   // kExact: with kTableCells further ones, for what these round away
      Real *sums;
    };
    __device__ __forceinline__ Table table() const {
      u32 *const largest = (u32 *)(memory + C.operand_bytes() + C.row_bytes());
      i32 *const cells = (i32 *)(largest + C.kWarpBytes / 4);
      return {largest, cells, (typename Table::Real *)(cells + C.cells())};
    }
    // The first load of the launch that reads the same tensor.
    static constexpr int first_of(int load) {
      for (int n = C.loads.first; n < load; ++n)
        if (C.loads.has(n) && Values::Of::captured_of(n) == Values::Of::captured_of(load)) return n;
      return load;
    }
    // Calls f(Load<n>()) for the first load of each tensor.
    template <class F> static __device__ __forceinline__ void each_tensor(const F &f) {
      each_load<C.loads>([&](auto load) {
        if constexpr (first_of(decltype(load)::kNumber) == decltype(load)::kNumber) f(load);
      });
    }

    __device__ __forceinline__ void sum_table(u32 pairs) const {
      const Table table = this->table();
      for (i32 n = t; n < C.cells(); n += kThreads) table.cells[n] = 0;
      for (i32 n = t; n < a.table_elements; n += kThreads) table.sums[n] = 0;
      Cells cells[kCount];
      const u32 tiles = (u32)div_up(in.seqlen_q, C.tile_q);
      for (u32 item = blockIdx.x; item < pairs * tiles; item += (u32)a.table_blocks) {
        const i32 pair = (i32)(item / tiles), b = pair / in.heads, h = pair % in.heads;
        const i32 q0 = (i32)(tiles - 1 - item % tiles) * C.tile_q;
        const Sequence s = in.sequence<F>(b);
        if (q0 >= s.band.seqlen_q) continue;
        const i32 q1 = (i32)min((i64)q0 + C.tile_q, s.band.seqlen_q);
        const Range keys = keys_of(s.band, q0, q1);
        Tile raw, dS;
        Place last;
        bool waits = false; // a tile waits to be added until all warps know its largest value
        const auto add_last = [&] {
          if (!waits) return;
          waits = false;
          each_tensor([&](auto load) { add_to_table<decltype(load)::kNumber>(cells, table, dS, raw, s, last); });
        };
        gradient.template run<true>(raw, dS, s, {b, h, q0, (i32)keys.begin}, q1, keys.end, add_last, [&](const Place &place) {
          find_largest(table, dS, raw, s, place);
          last = place, waits = true;
        });
      }
      __syncthreads();
      each_tensor([&](auto load) {
        flush(table, cells[C.loads.rank(decltype(load)::kNumber)], a.gradients[Values::Of::captured_of(decltype(load)::kNumber)]);
      });
      __syncthreads();
      auto *const result = (typename Table::Real *)a.tables + (i64)blockIdx.x * a.table_elements;
      for (i32 n = t; n < a.table_elements; n += kThreads) result[n] = table.sums[n];
    }
    // The largest values of this warp's part of a tile, as bits. Returns whether all values are finite.
    __device__ __forceinline__ bool largest_of_warp(u32 (&most)[kCount], const Tile &dS, const Tile &raw, const Sequence &s,
                                                    const Place &place) const {
      float own[kCount] = {};
      each_of(dS, raw, s, place, [&](const Element &, const Values &values) {
        each_load<C.loads>([&](auto load) {
          constexpr int kLoad = decltype(load)::kNumber;
          float &x = own[C.loads.rank(first_of(kLoad))];
          x = Reals<Functions::half, float>::maximum(x, fabsf(values.template value<kLoad>())); // NaN if one of them is
        });
      });
      bool finite = true;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        most[n] = __float_as_uint(own[n]);
#pragma unroll
        for (int m = 16; m; m /= 2) most[n] = max(most[n], __shfl_xor_sync(0xFFFFFFFFu, most[n], m));
        finite &= most[n] < kInfinite;
      }
      return finite;
    }
    // Stores the largest values of this warp's part of a tile. A pair with a value that is not finite makes its elements NaN, and its dS
    // becomes 0.
    __device__ __forceinline__ void find_largest(const Table &table, Tile &dS, const Tile &raw, const Sequence &s,
                                                 const Place &place) const {
      u32 most[kCount];
      if (!largest_of_warp(most, dS, raw, s, place)) {
        each_of(dS, raw, s, place, [&](const Element &x, const Values &values) {
          bool finite = true;
          each_load<C.loads>([&](auto load) { finite &= is_finite(values.template value<decltype(load)::kNumber>()); });
          if (finite) return;
          each_load<C.loads>([&](auto load) {
            constexpr int kLoad = decltype(load)::kNumber;
            const CapturedGradient &g = a.gradients[Values::Of::captured_of(kLoad)];
            table.sums[g.table + values.template element<kLoad>(in.function, g)] = typename Table::Real(__uint_as_float(0x7FC00000));
          });
          x.of(dS) = 0;
        });
        largest_of_warp(most, dS, raw, s, place);
      }
      if (t % 32 == 0) {
#pragma unroll
        for (int n = 0; n < kCount; ++n) table.largest[8 * n + t / 32] = most[n];
      }
    }
    static constexpr u32 kInfinite = 0x7F800000;
    static __device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & kInfinite) != kInfinite; }
    // Adds the values of a tile for the loads of the same tensor as kLoad, the first of them.
    template <int kLoad>
    __device__ __forceinline__ void add_to_table(Cells (&all)[kCount], const Table &table, const Tile &dS, const Tile &raw,
                                                 const Sequence &s, const Place &place) const {
      constexpr int kRank = C.loads.rank(kLoad);
      const CapturedGradient &g = a.gradients[Values::Of::captured_of(kLoad)];
      u32 most = 0;
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) most = max(most, table.largest[8 * kRank + w]);
      if (most == 0) return;
      Cells &cells = all[kRank];
      // A cell takes up to 2^log2_pairs values of a tile and load, since lanes of different numbers use different copies. All of them, of
      // up to kTimes loads, may be the largest one.
      const i32 log2_pairs = log2_of(C.tile_q * C.tile_k) - a.table_copies;
      constexpr i32 kLog2Times = kTimes<kLoad> > 2 ? 2 : (i32)kTimes<kLoad> - 1;
      const i32 bits = kExact ? 30 - log2_pairs - kLog2Times : min(29 - log2_pairs - kLog2Times / 2, kMostBits);
      const i32 exponent = min(bits - ((i32)(most >> 23) - 126), 126); // the largest integer has `bits` bits
      const auto bound = [&](i32 exponent) {                           // of a cell's sum
        return (u64)(__float2int_rn(__uint_as_float(most) * power(exponent)) + 1) * kTimes<kLoad> << log2_pairs;
      };
      const i32 more = cells.exponent - exponent; // bits of the largest integer in the present unit
      if (kExact || more > min(kMostBits - bits, 3) || more < -3 || cells.used + bound(cells.exponent) >= 1u << 31) {
        if (cells.used) {
          flush(table, cells, g);
          __syncthreads();
        }
        cells.exponent = exponent;
      }
      cells.used += bound(cells.exponent);
      const float unit = power(cells.exponent);
      const u32 own = shared_address(table.cells + ((g.table << a.table_copies) + (t & ((1 << a.table_copies) - 1))));
      each_of(dS, raw, s, place, [&](const Element &, const Values &values) {
        each_load<C.loads>([&](auto load) {
          constexpr int kOther = decltype(load)::kNumber;
          if constexpr (first_of(kOther) == kLoad) {
            const u32 cell = own + (u32)(4 << a.table_copies) * (u32)values.template element<kOther>(in.function, g);
            const float x = values.template value<kOther>();
            if constexpr (kExact) {
              const i32 whole = __float2int_rn(x * unit);
              add_shared(cell, whole), add_shared(cell + 4 * kTableCells, __float2int_rn((x * unit - (float)whole) * fine()));
            } else { // numbers of 2^23 to 2^24 are integers
              add_shared(cell, __float_as_int(fmaf(x, unit, 0x1.8p23f)) - __float_as_int(0x1.8p23f));
            }
          }
        });
      });
    }
    static constexpr i32 kMostBits = 22;
    static_assert(kLoadsAtOnce <= 4);
    template <int kLoad>
    static constexpr u64 kTimes = [] { // how many loads read the tensor
      u64 count = 0;
      for (int n = C.loads.first; n < C.loads.end(); ++n) count += C.loads.has(n) && first_of(n) == kLoad;
      return count;
    }();
    // The unit of the second integer in that of the first, of which it is at most a half. A cell has room for those of kLoadsAtOnce loads.
    __device__ __forceinline__ float fine() const { return (float)(1 << (29 - log2_of(C.tile_q * C.tile_k) + a.table_copies)); }
    static __device__ __forceinline__ float power(i32 k) { return __uint_as_float((u32)(127 + k) << 23); }
    static __device__ constexpr i32 log2_of(i32 x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }
    // Adds the cells of a tensor to the sums, and sets them to 0.
    __device__ __forceinline__ void flush(const Table &table, Cells &cells, const CapturedGradient &g) const {
      using Real = typename Table::Real;
      const i32 copies = 1 << a.table_copies;
      const Real inverse = (Real)power(-cells.exponent), rest = kExact ? inverse / (Real)fine() : Real(0);
      for (i32 n = t; n < (i32)g.count; n += kThreads) {
        i32 *const first = table.cells + ((g.table + n) << a.table_copies);
        Real sum = 0;
        const auto take = [&](i32 *cell) {
          sum += (Real)*cell * inverse, *cell = 0;
          if constexpr (kExact) sum += (Real)cell[kTableCells] * rest, cell[kTableCells] = 0;
        };
        if (copies < 4) {
          for (i32 copy = 0; copy < copies; ++copy) take(first + copy);
        } else { // lanes begin at different banks
          for (i32 copy = 0; copy < copies; copy += 4) {
            const i32 place = (copy + 4 * n) & (copies - 1);
#pragma unroll
            for (i32 k = 0; k < 4; ++k) take(first + place + k);
          }
        }
        table.sums[g.table + n] += sum;
      }
      cells.used = 0;
    }
    static __device__ __forceinline__ void add_shared(u32 address, i32 x) {
#if __CUDA_ARCH__ >= 700
      asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(address), "r"(x));
#else
      asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(x));
#endif
    }

    // Each pair by itself: the largest value, or all values to the elements' sums.
    __device__ __forceinline__ void take_pairs(u32 pair, i32 tile) const {
      const i32 b = (i32)(pair / in.heads), h = (i32)(pair % in.heads), q0 = tile * C.tile_q;
      const Sequence s = in.sequence<F>(b);
      if (q0 >= s.band.seqlen_q) return;
      const i32 q1 = (i32)min((i64)q0 + C.tile_q, s.band.seqlen_q);
      const Range keys = keys_of(s.band, q0, q1);
      float most[kCount] = {};
      each(s, {b, h, q0, (i32)keys.begin}, q1, keys.end, [&](const Element &, const Values &values) {
        each_load<C.loads>([&](auto load) {
          constexpr int kLoad = decltype(load)::kNumber, kTensor = Values::Of::captured_of(kLoad);
          const float x = values.template value<kLoad>();
          if constexpr (C.summed == kLargest) {
            if (is_finite(x)) most[C.loads.rank(kLoad)] = fmaxf(most[C.loads.rank(kLoad)], fabsf(x));
          } else if (x != 0) {
            const CapturedGradient &g = a.gradients[kTensor];
            add_pair(a, g, g.first + values.template element<kLoad>(in.function, g), a.largest[kTensor], x);
          }
        });
      });
      if constexpr (C.summed == kLargest)
        each_load<C.loads>([&](auto load) {
          constexpr int kLoad = decltype(load)::kNumber;
          raise_by_warp(a.largest + Values::Of::captured_of(kLoad), finite_size(most[C.loads.rank(kLoad)]));
        });
    }
  };
};

} // namespace strobe::passes
