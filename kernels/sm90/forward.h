// FlashAttention-2's forward on Hopper. One warp of a block has the copy engine bring Q and, tile by tile, K and V into shared memory; each of
// the other warpgroups owns 64 queries: S, P, O, m and l of them in its registers. While the tensor cores compute P V of one tile and Q K^T of
// the next, the warpgroup takes the softmax of the one between (FlashAttention-3, Shah et al. 2024); the warpgroups take turns at issuing.
#pragma once
#include "../attention/scores.h"
#include "../mma/dropout.h"
#include "../mma/softmax.h"
#include "../ptx/mbarrier.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../tile/copy.h"
#include "arguments.h"
#include "config.h"
#include "softmax.h"

namespace strobe::sm90 {

using tile::Accumulator;

template <Config C> struct Forward {
  using Arguments = HopperForwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kN = C.tile_k;
  static constexpr u32 kBlock = 64 * 2; // bytes of a row in shared memory

  // Shared memory, from an address that is a multiple of 1024.
  struct SharedMemory {
    u32 q, o, k, v, barriers, tiles;
    __device__ __forceinline__ explicit SharedMemory(u32 base)
        : q((base + 1023) & ~1023u), o(C.o_in_q ? q : q + C.q_bytes()), k(q + C.q_bytes() + C.o_bytes()), v(k + C.stages * C.k_bytes()),
          barriers(v + C.stages * C.v_bytes()), tiles(barriers + 512) {}
    __device__ __forceinline__ u32 q_full() const { return barriers; }
    __device__ __forceinline__ u32 q_empty() const { return barriers + 8; }
    __device__ __forceinline__ u32 k_full(int stage) const { return barriers + 16 + 32 * stage; }
    __device__ __forceinline__ u32 k_empty(int stage) const { return barriers + 24 + 32 * stage; }
    __device__ __forceinline__ u32 v_full(int stage) const { return barriers + 32 + 32 * stage; }
    __device__ __forceinline__ u32 v_empty(int stage) const { return barriers + 40 + 32 * stage; }
    __device__ __forceinline__ u32 tile(int stage) const { return tiles + 16 * stage; }
  };
  // Named barriers.
  enum Barrier { kTurn = 1, kStored = 8 }; // + the warpgroup's number

  // The stage of shared memory that is next, and the parity of its barriers.
  struct Stage {
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
      if (++index == C.stages) index = 0, parity ^= 1;
    }
  };

  // Which tile of queries: heads in bundles that share the L2 cache, in a bundle the last (longest, if causal) tile first.
  struct Item {
    i32 b, h, q;
    __device__ __forceinline__ Item(const ForwardArguments &a, u32 x) {
      u32 tiles = (u32)div_up(a.in.seqlen_q, C.tile_q()), all = (u32)(a.in.batch * a.in.heads);
      u32 bundle = x / (tiles * a.bundle), first = bundle * a.bundle, size = min(all - first, (u32)a.bundle);
      x -= first * tiles;
      u32 bh = first + x % size;
      q = (i32)(tiles - 1 - x / size) * C.tile_q();
      b = (i32)(bh / a.in.heads);
      h = (i32)(bh % a.in.heads);
    }
  };

  // A tile of keys, as the loading warp tells it to the others.
  struct Tile {
    i32 begin, end;
    bool masked, last;
    __device__ __forceinline__ static Tile read(u32 address) {
      u32 x[4];
      load_shared(x, address);
      return {(i32)x[0], (i32)x[1], x[2] != 0, x[3] != 0};
    }
    __device__ __forceinline__ void write(u32 address) const {
      u32 x[4] = {(u32)begin, (u32)end, masked, last};
      store_shared(address, x);
    }
  };

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const SharedMemory shared(shared_address(dynamic));
    if (threadIdx.x == 0) {
      mbarrier_init(shared.q_full(), 1);
      mbarrier_init(shared.q_empty(), C.warpgroups);
      for (int s = 0; s < C.stages; ++s) {
        mbarrier_init(shared.k_full(s), 1);
        mbarrier_init(shared.k_empty(s), 4 * C.warpgroups);
        mbarrier_init(shared.v_full(s), 1);
        mbarrier_init(shared.v_empty(s), 4 * C.warpgroups);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      registers_lower<C.registers_load>();
      if (threadIdx.x == 0) Load{a, shared}.all();
    } else {
      registers_raise<C.registers_compute>();
      Compute(a, shared, warpgroup - 1).all();
    }
  }

  // f(item, its number) for the tiles of this block.
  template <class Each> static __device__ __forceinline__ void each_item(const Arguments &a, Each &&f) {
    for (u32 x = blockIdx.x; x < a.items; x += gridDim.x) {
      if constexpr (C.redo) {
        u32 flagged = 0;
        for (int w = 0; w < C.warpgroups; ++w) flagged |= a.flags[x * C.warpgroups + w];
        if (!flagged) continue;
      }
      const Item item(a.a, x);
      const Sequence sequence = a.a.in.sequence(item.b);
      if (item.q < sequence.band.seqlen_q) f(item, sequence, x);
    }
  }

  struct Load {
    const Arguments &a;
    const SharedMemory &shared;
    Stage k{}, v{};
    u32 q_parity = 0;

    __device__ __forceinline__ void all() {
      each_item(a, [&](const Item &item, const Sequence &sequence, u32) { load(item, sequence); });
    }

    __device__ __forceinline__ void load(const Item &item, const Sequence &sequence) {
      const Inputs &in = a.a.in;
      const i32 kv = item.h / in.group;
      BlockRow row{nullptr, 0, 0};
      if constexpr (F.blocks) row = in.blocks.row(item.b, item.h, item.q / in.blocks.row_tokens);
      const i64 q1 = min((i64)item.q + C.tile_q(), sequence.band.seqlen_q);
      Schedule tiles(sequence.band, item.q, q1, kN, 16, row);

      mbarrier_wait(shared.q_empty(), q_parity ^ 1);
      q_parity ^= 1;
      mbarrier_expect(shared.q_full(), 2 * C.tile_q() * C.columns());
      for (int w = 0; w < C.warpgroups; ++w)
        for (int c = 0; c < C.columns(); c += 64)
          tma_load(shared.q + 64 * w * 2 * C.columns() + 64 * kBlock * (c / 64), a.q.map, shared.q_full(), c,
                   (i32)sequence.q0 + item.q + 64 * w, item.h * a.q.head_step, item.b * a.q.batch_step);

      KeyTile next;
      bool more = tiles.next(next), none = !more;
      if (none) next = {0, 0, true};
      i32 before = -1; // where the tile begins whose V is still to be loaded
      do {
        const KeyTile tile = next;
        more = more && tiles.next(next);
        mbarrier_wait(shared.k_empty(k.index), k.parity ^ 1);
        Tile{(i32)tile.begin, (i32)tile.end, tile.masked || tile.end - tile.begin < kN, !more}.write(shared.tile(k.index));
        load<C.columns(), C.k_bytes()>(a.k, shared.k_full(k.index), shared.k + k.index * C.k_bytes(), (i32)(sequence.k0 + tile.begin), kv,
                                       item.b);
        k.advance();
        if (before >= 0) load_v(sequence, before, kv, item.b);
        before = (i32)tile.begin;
      } while (more);
      load_v(sequence, before, kv, item.b);
    }

    __device__ __forceinline__ void load_v(const Sequence &sequence, i32 begin, i32 kv, i32 b) {
      mbarrier_wait(shared.v_empty(v.index), v.parity ^ 1);
      load<C.columns_v(), C.v_bytes()>(a.v, shared.v_full(v.index), shared.v + v.index * C.v_bytes(), (i32)sequence.k0 + begin, kv, b);
      v.advance();
    }
    template <int kColumns, u32 kBytes>
    static __device__ __forceinline__ void load(const MappedOperand &x, u32 full, u32 address, i32 row, i32 head, i32 b) {
      mbarrier_expect(full, kBytes);
#pragma unroll
      for (int c = 0; c < kColumns; c += 64)
        tma_load(address + kN * kBlock * (c / 64), x.map, full, c, row, head * x.head_step, b * x.batch_step);
    }
  };

  struct Compute {
    const Arguments &a;
    const Inputs &in;
    const SharedMemory &shared;
    const int w, lane, warp; // warpgroup; warp within it
    Stage k{}, v{};
    u32 q_parity = 0;
    float O[kDv / 2], S[kN / 2];
    u32 P[kN / 4], Q[C.q_in_registers ? kD / 4 : 1];

    __device__ __forceinline__ Compute(const Arguments &a, const SharedMemory &shared, int w)
        : a(a), in(a.a.in), shared(shared), w(w), lane((int)threadIdx.x % 32),
          warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)) {}

    __device__ __forceinline__ void all() {
      if (C.warpgroups > 1 && w == C.warpgroups - 1) barrier_arrive(kTurn, 256); // the first turn is warpgroup 0's
      each_item(a, [&](const Item &item, const Sequence &sequence, u32 x) { compute(item, sequence, x); });
    }

    __device__ __forceinline__ void compute(const Item &item, const Sequence &sequence, u32 x) {
      const Scores<F, float> scores(in, sequence, item.b);
      const mma::BlockDropout<F> dropout{Dropout<F>(in), (u32)item.h, (u32)item.b};
      const i32 q = item.q + 64 * w;
      const auto upper = scores.row(q + 16 * warp + tile::lane_row(0), item.h),
                 lower = scores.row(q + 16 * warp + tile::lane_row(1), item.h);
      // Keys that some query of this warpgroup sees by position.
      const Range visible = q < scores.seqlen_q ? sequence.band.keys_any(q, min(q + 64, scores.seqlen_q)) : Range{0, 0};
      const i32 first = (i32)visible.begin, end = (i32)visible.end;
      auto sees = [&](const Tile &t) { return t.begin < end && t.end > first; };
      Softmax softmax;
      float alpha[2] = {1, 1};
      bool settled = false; // every row has a reference

      load_q();
#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) O[i] = 0;

      auto finish_scores = [&](const Tile &t, auto by_position) {
        constexpr bool kByPosition = decltype(by_position)::value;
        if constexpr (kByPosition || F.additive() || F.mask) {
#pragma unroll
          for (int i = 0; i < kN / 2; ++i) {
            const i32 j = t.begin + 8 * (i / 4) + tile::lane_column(0, i % 2);
            S[i] = scores.score(S[i], i / 2 % 2 ? lower : upper, j, kByPosition, t.end);
          }
        }
      };
      auto finish_p = [&](const Tile &t) {
        if constexpr (F.dropout) {
#pragma unroll
          for (int n = 0; n < kN / 2; n += 16)
            dropout.apply(reinterpret_cast<Accumulator &>(S[n]), reinterpret_cast<Accumulator &>(S[n + 8]), q + 16 * warp, t.begin + 2 * n);
        }
      };
      auto round_p = [&] {
#pragma unroll
        for (int i = 0; i < kN / 4; ++i) P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
      };
      // The first tile that this warpgroup sees.
      auto begin = [&](const Tile &t, bool turn) {
        if (turn) wait_turn();
        registers_changed(S);
        wgmma_fence();
        multiply_q_k();
        wgmma_commit();
        if (turn) pass_turn();
        wgmma_wait<0>();
        registers_changed(S);
        release(shared.k_empty(k.index));
        k.advance();
        finish_scores(t, True{});
        softmax.template follow<kExact>(S, scores.unit, alpha);
        softmax.template exponentiate<false>(S, scores.unit);
        finish_p(t);
        round_p();
      };
      // Q K^T of this tile and P V of the one before; meanwhile the softmax of this one.
      auto step = [&](const Tile &t, auto by_position, auto follow) {
        constexpr bool kFollow = decltype(follow)::value;
        wait_turn();
        registers_changed(S);
        registers_changed(O);
        registers_changed(P);
        wgmma_fence();
        multiply_q_k();
        wgmma_commit();
        mbarrier_wait(shared.v_full(v.index), v.parity);
        wgmma_fence();
        multiply_p_v();
        wgmma_commit();
        pass_turn();
        wgmma_wait<1>();
        registers_changed(S);
        release(shared.k_empty(k.index));
        k.advance();
        finish_scores(t, by_position);
        if constexpr (kFollow) softmax.template follow<C.reference>(S, scores.unit, alpha);
        softmax.template exponentiate<!kFollow>(S, scores.unit);
        finish_p(t);
        registers_changed(S);
        wgmma_wait<0>();
        registers_changed(O);
        registers_changed(P);
        release(shared.v_empty(v.index));
        v.advance();
        round_p();
        if constexpr (kFollow) {
          if (__any_sync(0xFFFFFFFFu, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < kDv / 2; ++i) O[i] *= alpha[i / 2 % 2];
          }
        }
      };

      Tile t = wait_tile();
      bool turn = false; // every tile of an item but its first takes one
      while (!sees(t) && !t.last) {
        skip(turn);
        turn = true;
        t = wait_tile();
      }
      bool open = sees(t); // P V of a tile is still to be computed
      if (open) {
        begin(t, turn);
        settled = !t.masked;
#pragma unroll 1
        while (!t.last) {
          t = wait_tile();
          if (!sees(t)) break;
          if (t.masked)
            step(t, True{}, True{});
          else if (C.reference != kFixed || !settled)
            step(t, False{}, True{});
          else
            step(t, False{}, False{});
          settled |= !t.masked;
        }
        mbarrier_wait(shared.v_full(v.index), v.parity);
        registers_changed(O);
        registers_changed(P);
        wgmma_fence();
        multiply_p_v();
        wgmma_commit();
        wgmma_wait<0>();
        registers_changed(O);
        registers_changed(P);
        release(shared.v_empty(v.index));
        v.advance();
      }
      if (!sees(t)) { // this one, and what follows it
        skip(turn || open);
        while (!t.last) {
          t = wait_tile();
          skip(true);
        }
      }
      if constexpr (!C.q_in_registers && !C.o_in_q) done_with_q();
      finish(item, sequence, scores.seqlen_q, softmax, dropout.dropout.factor(), x);
      if constexpr (C.o_in_q) done_with_q();
    }

    __device__ __forceinline__ Tile wait_tile() {
      mbarrier_wait(shared.k_full(k.index), k.parity);
      return Tile::read(shared.tile(k.index));
    }
    __device__ __forceinline__ void release(u32 empty) const {
      if (lane == 0) mbarrier_arrive(empty);
    }
    // A tile that this warpgroup sees nothing of.
    __device__ __forceinline__ void skip(bool turn) {
      if (turn) {
        wait_turn();
        pass_turn();
      }
      __syncwarp();
      release(shared.k_empty(k.index));
      k.advance();
      mbarrier_wait(shared.v_full(v.index), v.parity);
      release(shared.v_empty(v.index));
      v.advance();
    }
    __device__ __forceinline__ void wait_turn() const {
      if constexpr (C.warpgroups > 1) barrier_sync(kTurn + w, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
      if constexpr (C.warpgroups > 1) barrier_arrive(kTurn + (w + 1 == C.warpgroups ? 0 : w + 1), 256);
    }

    __device__ __forceinline__ u32 q_address() const { return shared.q + 64 * w * 2 * C.columns(); }
    __device__ __forceinline__ void load_q() {
      mbarrier_wait(shared.q_full(), q_parity);
      q_parity ^= 1;
      if constexpr (C.q_in_registers) {
        const int row = 16 * warp + lane % 16;
#pragma unroll
        for (int c = 0; c < kD / 16; ++c) {
          const int chunk = c % 4 * 2 + lane / 16;
          ldmatrix(reinterpret_cast<u32(&)[4]>(Q[4 * c]), q_address() + 64 * kBlock * (c / 4) + row * kBlock + ((chunk ^ row % 8) << 4));
        }
        if constexpr (!C.o_in_q) done_with_q();
      }
    }
    __device__ __forceinline__ void done_with_q() {
      barrier_sync(kStored + w, 128);
      if (threadIdx.x % 128 == 0) mbarrier_arrive(shared.q_empty());
    }

    // S = Q K^T
    __device__ __forceinline__ void multiply_q_k() {
      const u64 q = descriptor_k_major(q_address()), key = descriptor_k_major(shared.k + k.index * C.k_bytes());
#pragma unroll
      for (int c = 0; c < kD / 16; ++c) {
        const u64 b = advance(key, kN * kBlock * (c / 4) + 32 * (c % 4));
        if constexpr (C.q_in_registers) {
          c ? Wgmma<T, kN>::template registers<true, 0>(S, Q + 4 * c, b) : Wgmma<T, kN>::template registers<false, 0>(S, Q, b);
        } else {
          const u64 left = advance(q, 64 * kBlock * (c / 4) + 32 * (c % 4));
          c ? Wgmma<T, kN>::template shared<true>(S, left, b) : Wgmma<T, kN>::template shared<false>(S, left, b);
        }
      }
    }
    // O += P V
    __device__ __forceinline__ void multiply_p_v() {
      const u64 value = descriptor_mn_major(shared.v + v.index * C.v_bytes(), kN * kBlock);
#pragma unroll
      for (int n = 0; n < kN / 16; ++n) Wgmma<T, kDv>::template registers<true, 1>(O, P + 4 * n, advance(value, 16 * kBlock * n));
    }

    // O / l and LSE to memory.
    __device__ __forceinline__ void finish(const Item &item, const Sequence &sequence, i32 seqlen_q, const Softmax &softmax, float factor,
                                           u32 x) {
      constexpr float kLog2e = 1.44269504088896340736f;
      const i32 q = item.q + 64 * w;
      const float sink = in.sinks ? *in.sinks.at<const float>(0, item.h, 0, 0) * kLog2e : minus_infinity<float>();
      if constexpr (C.reference == kFixed) {
        const bool bad = __any_sync(0xFFFFFFFFu, softmax.overflowed());
        if (lane == 0) reinterpret_cast<u8 *>(a.flags)[(x * C.warpgroups + w) * 4 + warp] = bad;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const mma::RowEnd end(softmax.M[r], tile::row_sum(softmax.l[r]), sink);
        const i32 i = q + 16 * warp + tile::lane_row(r);
        if (a.a.lse && lane % 4 == 0 && i < seqlen_q) *a.a.lse.template at<float>(item.b, item.h, sequence.q0 + i, 0) = end.lse;
#pragma unroll
        for (int c = 0; c < kDv / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) O[4 * c + 2 * r + e] *= end.factor * factor;
      }
      const u32 place = shared.o + 64 * w * 2 * C.columns_v();
      barrier_sync(kStored + w, 128); // the last tile has been read from there
#pragma unroll
      for (int c = 0; c < kDv / 16; ++c)
        tile::store<kDv>(place, 16 * warp, 16 * c, tile::rounded<T>(reinterpret_cast<const Accumulator &>(O[8 * c])));
      barrier_sync(kStored + w, 128);
      T *out = a.a.out.template at<T>(item.b, item.h, sequence.q0 + q, 0);
      tile::store<64, kDv, 128, true>(tile::Matrix<T>{out, a.a.out.stride[2], 1, seqlen_q - q, in.head_dim_v}, place,
                                      (int)threadIdx.x % 128);
    }
  };

private:
  struct True {
    static constexpr bool value = true;
  };
  struct False {
    static constexpr bool value = false;
  };
};

} // namespace strobe::sm90
