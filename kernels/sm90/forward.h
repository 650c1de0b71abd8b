// FlashAttention-2's forward on Hopper. One thread of a block has the copy engine bring Q and, tile by tile, K and V into shared memory; each of
// the other warpgroups owns 64 queries: S, P, O, m and l of them in its registers. While the tensor cores compute P V of one tile and Q K^T of
// the next, the warpgroup takes the softmax of the one between (FlashAttention-3, Shah et al. 2024); the warpgroups take turns at issuing.
#pragma once
#include "../attention/scores.h"
#include "../mma/dropout.h"
#include "../mma/softmax.h"
#include "../ptx/mbarrier.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../tile/shared.h"
#include "arguments.h"
#include "config.h"
#include "softmax.h"
#include "tickets.h"

namespace strobe::sm90 {

using tile::Accumulator;

template <Config C> struct Forward {
  using Arguments = HopperForwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kN = C.tile_k;
  static constexpr u32 kBlock = 64 * 2; // bytes of a row in shared memory
  static_assert(C.stages <= 6, "the barriers' place");
  static_assert(!F.dropout || kN % 32 == 0, "dropout draws for 32 keys");

  // Shared memory, from an address that is a multiple of 1024.
  struct SharedMemory {
    u32 q, k, v, barriers, messages;
    __device__ __forceinline__ explicit SharedMemory(u32 base)
        : q((base + 1023) & ~1023u), k(q + C.q_bytes()), v(k + C.stages * C.k_bytes()), barriers(v + C.stages * C.v_bytes()),
          messages(barriers + 256) {}
    __device__ __forceinline__ u32 q_full() const { return barriers; }
    __device__ __forceinline__ u32 q_empty() const { return barriers + 8; }
    __device__ __forceinline__ u32 item_full() const { return barriers + 16; }
    __device__ __forceinline__ u32 item_empty() const { return barriers + 24; }
    __device__ __forceinline__ u32 judged(u32 n) const { return barriers + 32 + 8 * (n % 2); }
    __device__ __forceinline__ u32 k_full(int stage) const { return barriers + 48 + 32 * stage; }
    __device__ __forceinline__ u32 k_empty(int stage) const { return barriers + 56 + 32 * stage; }
    __device__ __forceinline__ u32 v_full(int stage) const { return barriers + 64 + 32 * stage; }
    __device__ __forceinline__ u32 v_empty(int stage) const { return barriers + 72 + 32 * stage; }
    __device__ __forceinline__ u32 item() const { return messages; }
    __device__ __forceinline__ u32 overflow(u32 n) const { return messages + 16 + 4 * (n % 2); }
    __device__ __forceinline__ u32 tile(int stage) const { return messages + 32 + 16 * stage; }
  };
  // Named barrier: it is this warpgroup's turn, + its number.
  static constexpr int kTurn = 1;

  // The stage of shared memory that is next, and the parity of its barriers.
  struct Stage {
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
      if (++index == C.stages) index = 0, parity ^= 1;
    }
  };

  // What the assigning thread tells the others: a tile of queries, or that there is none left.
  enum Kind : i32 { kNone, kOnce, kSafely }; // kOnce: with the fixed reference
  struct Item {
    i32 b, h, q;
    i32 kind;
  };
  // What the loading thread tells the others: a tile of keys. It reaches them with K.
  struct Tile {
    i32 begin, end;
    i32 masked, last;
  };
  template <class Message> static __device__ __forceinline__ Message read(u32 address) {
    u32 x[4];
    load_shared(x, address);
    return {(i32)x[0], (i32)x[1], (i32)x[2], (i32)x[3]};
  }
  static __device__ __forceinline__ void write(u32 address, i32 a, i32 b, i32 c, i32 d) {
    u32 x[4] = {(u32)a, (u32)b, (u32)c, (u32)d};
    store_shared(address, x);
  }

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const SharedMemory shared(shared_address(dynamic));
    if (threadIdx.x == 0) {
      mbarrier_init(shared.q_full(), 1);
      mbarrier_init(shared.q_empty(), 4 * C.warpgroups);
      mbarrier_init(shared.item_full(), 1);
      mbarrier_init(shared.item_empty(), 4 * C.warpgroups + 1);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(shared.judged(n), 4 * C.warpgroups);
        store_shared(shared.overflow(n), 0);
      }
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
      if (threadIdx.x == 0) Load{a, a.a.in, shared}.all();
      if (threadIdx.x == 32) Assign{a, a.a.in, shared}.all();
    } else {
      registers_raise<C.registers_compute>();
      Compute(a, shared, warpgroup - 1).all();
    }
  }

  // Decides which tiles of queries this block computes.
  struct Assign {
    const Arguments &a;
    const Inputs &in;
    const SharedMemory &shared;
    u32 told = 0, verdicts = 0;

    __device__ __forceinline__ void all() {
      Item before{0, 0, 0, kNone};
      i32 kind = C.reference == kFixed ? kOnce : kSafely;
      bool first = true;
#pragma unroll 1
      for (u32 x = blockIdx.x; x < a.items;) {
        const Item item = this->item(x, kind);
        if (item.kind != kNone) tell(item);
        x = a.items;
        if (gridDim.x < a.items) {
          const u32 ticket = first ? first_ticket(a.tickets) : next_ticket(a.tickets);
          first = false;
          if (ticket == a.items - 1) return_tickets(a.tickets);
          x = gridDim.x + ticket;
        }
        if (item.kind == kNone) continue;
        if (overflowed(before)) kind = kSafely; // and no more risks
        before = item;
      }
      overflowed(before);
      tell({0, 0, 0, kNone});
    }

    // Within a bundle of heads the last (longest, if causal) tile first.
    __device__ __forceinline__ Item item(u32 x, i32 kind) const {
      const u32 bundle = a.bundle_items.divide(x), within = x - bundle * a.bundle_items.by, tile = a.bundle.divide(within);
      const u32 head = bundle * a.bundle.by + within - tile * a.bundle.by, b = a.heads.divide(head);
      const i32 q = (a.tiles - 1 - (i32)tile) * C.tile_q();
      const bool empty = in.cu_seqlens_q && q >= in.sequence(b).band.seqlen_q;
      return {(i32)b, (i32)(head - b * a.heads.by), q, empty ? kNone : kind};
    }
    __device__ __forceinline__ void tell(const Item &item) {
      mbarrier_wait(shared.item_empty(), told++ % 2 ^ 1);
      write(shared.item(), item.b, item.h, item.q, item.kind);
      mbarrier_arrive(shared.item_full());
    }
    // Waits for the verdict on an item that was computed kOnce; has it computed again if need be.
    __device__ __forceinline__ bool overflowed(const Item &item) {
      if (item.kind != kOnce) return false;
      const u32 n = verdicts++;
      mbarrier_wait(shared.judged(n), n / 2 % 2);
      if (!load_shared(shared.overflow(n))) return false;
      store_shared(shared.overflow(n), 0);
      tell({item.b, item.h, item.q, kSafely});
      return true;
    }
  };

  // Tells the copy engine what to fetch.
  struct Load {
    const Arguments &a;
    const Inputs &in;
    const SharedMemory &shared;
    Stage k{}, v{};
    u32 items = 0;

    __device__ __forceinline__ void all() {
      tma_prefetch(a.q.map), tma_prefetch(a.k.map), tma_prefetch(a.v.map);
#pragma unroll 1
      for (;; ++items) {
        mbarrier_wait(shared.item_full(), items % 2);
        const Item item = read<Item>(shared.item());
        mbarrier_arrive(shared.item_empty());
        if (item.kind == kNone) break;
        load(item);
      }
    }

    __device__ __forceinline__ void load(const Item &item) {
      const Sequence sequence = in.sequence(item.b);
      const BasicBand<i32> band = narrow(sequence.band);
      const i32 kv = (i32)a.group.divide(item.h), k0 = (i32)sequence.k0;
      BlockRow row{nullptr, 0, 0};
      if constexpr (F.blocks) row = in.blocks.row(item.b, item.h, item.q / in.blocks.row_tokens);
      BasicSchedule<i32> tiles(band, item.q, min(item.q + C.tile_q(), band.seqlen_q), kN, 16, row);
      BasicKeyTile<i32> next;
      bool more = tiles.next(next);
      if (!more) next = {0, 0, true};
      i32 before = -1; // where the tile begins whose V is still to be loaded
#pragma unroll 1
      do {
        const BasicKeyTile<i32> tile = next;
        more = more && tiles.next(next);
        mbarrier_wait(shared.k_empty(k.index), k.parity ^ 1);
        write(shared.tile(k.index), tile.begin, tile.end, tile.masked || tile.end - tile.begin < kN, !more);
        load<C.columns(), C.k_bytes()>(a.k, shared.k_full(k.index), shared.k + k.index * C.k_bytes(), k0 + tile.begin, kv, item.b);
        k.advance();
        if (before < 0)
          load_q(item, (i32)sequence.q0 + item.q);
        else
          load_v(k0 + before, kv, item.b);
        before = tile.begin;
      } while (more);
      load_v(k0 + before, kv, item.b);
    }

    __device__ __forceinline__ void load_q(const Item &item, i32 row) {
      mbarrier_wait(shared.q_empty(), items % 2 ^ 1);
      mbarrier_expect(shared.q_full(), C.q_bytes());
      for (int w = 0; w < C.warpgroups; ++w)
        for (int c = 0; c < C.columns(); c += 64)
          tma_load(shared.q + 64 * w * 2 * C.columns() + 64 * kBlock * (c / 64), a.q.map, shared.q_full(), c, row + 64 * w,
                   item.h * a.q.head_step, item.b * a.q.batch_step);
    }
    __device__ __forceinline__ void load_v(i32 row, i32 kv, i32 b) {
      mbarrier_wait(shared.v_empty(v.index), v.parity ^ 1);
      load<C.columns_v(), C.v_bytes()>(a.v, shared.v_full(v.index), shared.v + v.index * C.v_bytes(), row, kv, b);
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
    u32 verdicts = 0;
    float O[kDv / 2], S[kN / 2];
    u32 P[kN / 4], Q[C.q_in_registers ? kD / 4 : 1];

    __device__ __forceinline__ Compute(const Arguments &a, const SharedMemory &shared, int w)
        : a(a), in(a.a.in), shared(shared), w(w), lane((int)threadIdx.x % 32),
          warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)) {}

    __device__ __forceinline__ void all() {
      if (C.warpgroups > 1 && w == C.warpgroups - 1) barrier_arrive(kTurn, 256); // the first turn is warpgroup 0's
      for (u32 items = 0;; ++items) {
        mbarrier_wait(shared.item_full(), items % 2);
        const Item item = read<Item>(shared.item());
        __syncwarp();
        release(shared.item_empty());
        if (item.kind == kNone) break;
        mbarrier_wait(shared.q_full(), items % 2);
        compute(item);
      }
    }

    __device__ __forceinline__ void compute(const Item &item) {
      if constexpr (C.q_in_registers) load_q();
      const Sequence sequence = in.sequence(item.b);
      const Scores<F, float> scores(in, sequence, item.b);
      const mma::BlockDropout<F> dropout{Dropout<F>(in), (u32)item.h, (u32)item.b};
      const i32 q = item.q + 64 * w;
      const typename Scores<F, float>::Row rows[2] = {scores.row(q + 16 * warp + tile::lane_row(0), item.h),
                                                      scores.row(q + 16 * warp + tile::lane_row(1), item.h)};
      // Keys that some query of this warpgroup sees by position.
      const auto visible = q < scores.seqlen_q ? narrow(sequence.band).keys_any(q, min(q + 64, scores.seqlen_q)) : BasicRange<i32>{0, 0};
      auto sees = [&](const Tile &t) { return t.begin < visible.end && t.end > visible.begin; };
      Softmax softmax;
      bool follows = true; // the reference follows the maxima

      // Q K^T of tile t, in S -> P, in S
      auto softmax_of = [&](const Tile &t) {
        if constexpr (F.additive() || F.mask) {
          if (t.masked)
            score<true>(scores, rows, t);
          else
            score<false>(scores, rows, t);
        } else if (t.masked) {
          hide(rows, t);
        }
        if (follows) softmax.template follow<C.reference == kExact>(S, scores.unit);
        softmax.exponentiate(S, scores.unit);
        if constexpr (F.dropout) {
#pragma unroll
          for (int n = 0; n < kN / 2; n += 16)
            dropout.apply(reinterpret_cast<Accumulator &>(S[n]), reinterpret_cast<Accumulator &>(S[n + 8]), q + 16 * warp, t.begin + 2 * n);
        }
      };
      // Whether there is a tile after t to be computed; t becomes it.
      auto next = [&](Tile &t) {
        if constexpr (C.reference == kFixed) follows = follows && (t.masked || item.kind == kSafely);
        if (t.last) return false;
        t = wait_tile(
            __any_sync(0xFFFFFFFFu, softmax.l[0] + softmax.l[1] < 0)); // it is not: but the compiler has to finish the softmax first
        return sees(t);
      };

#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) O[i] = 0;
      Tile t = wait_tile();
      bool turn = false; // every tile of an item but its first takes one
      while (!sees(t) && !t.last) {
        skip(turn);
        turn = true;
        t = wait_tile();
      }
      const bool any = sees(t);
      if (any) {
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
        softmax_of(t);
        round_p();
        bool more = next(t);
#pragma unroll 1
        while (more) { // Q K^T of this tile and P V of the one before; meanwhile the softmax of this one
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
          const bool followed = follows;
          softmax_of(t);
          registers_changed(S);
          more = next(t); // its wait also keeps the compiler from waiting for P V before the softmax
          wgmma_wait<0>();
          registers_changed(O);
          registers_changed(P);
          release(shared.v_empty(v.index));
          v.advance();
          round_p();
          if (followed && softmax.moved()) softmax.rescale(O);
        }
        if constexpr (!C.q_in_registers) release(shared.q_empty());
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
      } else if constexpr (!C.q_in_registers) {
        __syncwarp();
        release(shared.q_empty());
      }
      if (!sees(t)) { // this one, and what follows it
        skip(turn || any);
        while (!t.last) {
          t = wait_tile();
          skip(true);
        }
      }
      if (C.reference == kFixed && item.kind == kOnce) judge(softmax.overflowed());
      finish(item, sequence, scores.seqlen_q, softmax, dropout.dropout.factor());
    }

    __device__ __forceinline__ Tile wait_tile(bool other_parity = false) {
      mbarrier_wait(shared.k_full(k.index), k.parity ^ other_parity);
      return read<Tile>(shared.tile(k.index));
    }
    __device__ __forceinline__ void release(u32 empty) const {
      if (lane == 0) mbarrier_arrive(empty);
    }
    __device__ __forceinline__ void judge(bool overflowed) {
      const u32 n = verdicts++;
      const bool any = __any_sync(0xFFFFFFFFu, overflowed);
      if (any && lane == 0) store_shared(shared.overflow(n), 1);
      release(shared.judged(n));
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
      const int row = 16 * warp + lane % 16;
#pragma unroll
      for (int c = 0; c < kD / 16; ++c) {
        const int chunk = c % 4 * 2 + lane / 16;
        ldmatrix(reinterpret_cast<u32(&)[4]>(Q[4 * c]), q_address() + 64 * kBlock * (c / 4) + row * kBlock + ((chunk ^ row % 8) << 4));
      }
      __syncwarp();
      release(shared.q_empty());
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
    __device__ __forceinline__ void round_p() {
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
    }

    // Hides what lies outside the rows' bands, or beyond the tile.
    template <class Row> __device__ __forceinline__ void hide(const Row (&rows)[2], const Tile &t) {
      const i32 column = t.begin + tile::lane_column(0, 0);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const i32 begin = rows[r].begin - column, end = min(rows[r].end, t.end) - column;
#pragma unroll
        for (int i = 2 * r; i < kN / 2; i += i % 2 ? 3 : 1) {
          const i32 j = i / 4 * 8 + i % 2;
          if ((F.band && j < begin) || j >= end) S[i] = minus_infinity<float>();
        }
      }
    }
    template <bool kByPosition, class Row>
    __device__ __forceinline__ void score(const Scores<F, float> &scores, const Row (&rows)[2], const Tile &t) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i)
        S[i] = scores.score(S[i], rows[i / 2 % 2], t.begin + i / 4 * 8 + tile::lane_column(0, i % 2), kByPosition, t.end);
    }

    // O / l and LSE to memory.
    __device__ __forceinline__ void finish(const Item &item, const Sequence &sequence, i32 seqlen_q, const Softmax &softmax, float factor) {
      constexpr float kLog2e = 1.44269504088896340736f;
      const float sink = in.sinks ? *in.sinks.at<const float>(0, item.h, 0, 0) * kLog2e : minus_infinity<float>();
      const i32 odd = lane % 2, column = 8 * odd + lane % 4 / 2 * 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const mma::RowEnd end(softmax.M[r], tile::row_sum(softmax.l[r]), sink);
        const i32 i = item.q + 64 * w + 16 * warp + tile::lane_row(r);
        if (a.a.lse && lane % 4 == 0 && i < seqlen_q) *a.a.lse.template at<float>(item.b, item.h, sequence.q0 + i, 0) = end.lse;
        T *out = a.a.out.template at<T>(item.b, item.h, sequence.q0 + i, 0) + column;
        const float by = end.factor * factor;
        // Two lanes exchange halves of neighbouring blocks of 8 columns, so that each stores 8 bytes and all of them whole sectors.
#pragma unroll
        for (int c = 0; c < kDv; c += 16) {
          const float *o = O + c / 2 + 2 * r;
          const u32 left = pack<T>(o[0] * by, o[1] * by), right = pack<T>(o[4] * by, o[5] * by);
          const u32 other = __shfl_xor_sync(0xFFFFFFFFu, odd ? left : right, 1);
          if (i < seqlen_q && c + column < in.head_dim_v) store_global(out + c, odd ? other : left, odd ? right : other);
        }
      }
    }
  };
};

} // namespace strobe::sm90
