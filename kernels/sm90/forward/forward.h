// FlashAttention-2's forward on Hopper. One thread of a block has the copy engine bring Q and, tile by tile, K and V into shared memory;
// each of the other warpgroups owns 64 queries: S, P, O, m and l of them in its registers. While the tensor cores compute P V of one tile
// and Q K^T of the next, the warpgroup takes the softmax of the one between (FlashAttention-3, Shah et al. 2024); the warpgroups take turns
// at issuing.
#pragma once
#include "../../device/nonfinite.h"
#include "../../device/query_major_dropout.h"
#include "../../device/scores.h"
#include "../../device/softmax.h"
#include "../../ptx/wgmma.h"
#include "../../tile/shared.h"
#include "assign.h"
#include "exponent.h"
#include "given.h"
#include "load.h"

namespace strobe::sm90 {

template <Config C> struct Forward {
  using Arguments = HopperForwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  using Score = Scores<F, float, C.reference != kExact>;
  using Softcap = sm90::Softcap<F, C.reference != kExact>;
  static constexpr bool kLine = Line<C, Score>::kIs;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;
  // Of l: up to kMost P is what its type holds; from kFar on the reference follows.
  static constexpr float kMost = C.dtype == kF16 ? 65504.0f : 1e30f, kFar = C.dtype == kF16 ? 4096.0f : 1e12f;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kN = C.tile_k;
  static_assert(!F.dropout || kN % 32 == 0, "dropout draws for 32 keys");

  // Named barriers, + the warpgroup's number: it is its turn; all of it have come.
  static constexpr int kTurn = 1, kTogether = kTurn + C.warpgroups;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const SharedMemory<C> shared(shared_address(dynamic));
    if (threadIdx.x == 0) shared.begin();
    __syncthreads();
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      registers_lower<C.registers_load>();
      if (threadIdx.x == 0) Load<C>{a, a.in, shared}.all();
      if (threadIdx.x == 64) LoadQ<C>{a, shared}.all();
      if (threadIdx.x == 32) Assign<C>{a, a.in, shared}.all();
    } else {
      registers_raise<C.registers_compute>();
      Compute(a, shared, warpgroup - 1).all();
    }
  }

  struct Compute {
    const Arguments &a;
    const Inputs &in;
    const SharedMemory<C> &shared;
    const int w, lane, warp; // warpgroup; warp within it
    Stage<C> k{}, v{};
    u32 items = 0, verdicts = 0;
    float O[kDv / 2], S[kN / 2];
    u32 P[kN / 4], Q[C.q_in_registers ? kD / 4 : 1];
    u32 random[F.dropout ? kN / 32 : 1][4];

    __device__ __forceinline__ Compute(const Arguments &a, const SharedMemory<C> &shared, int w)
        : a(a), in(a.in), shared(shared), w(w), lane((int)threadIdx.x % 32), warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)) {}

    __device__ __forceinline__ void all() {
      if (C.warpgroups > 1 && w == C.warpgroups - 1) barrier_arrive(kTurn, 256); // the first turn is warpgroup 0's
      for (;; ++items) {
        mbarrier_wait(shared.item_full(), items % 2);
        const Item item = read<Item>(shared.item());
        __syncwarp();
        release(shared.item_empty());
        if (item.kind() == kNone) break;
        mbarrier_wait(shared.q_full(w), items % 2);
        compute(item);
      }
    }

    __device__ __forceinline__ void compute(const Item &item) {
      if constexpr (C.q_in_registers) load_q();
      const Sequence sequence = in.sequence(item.b);
      const Score scores(in, sequence, item.b);
      const QueryMajorDropout<F> dropout{Dropout<F>(in), (u32)item.h, (u32)item.b};
      const i32 q = item.q + 64 * w;
      const typename Score::Row rows[2] = {scores.row(q + 16 * warp + tile::lane_row(0), item.h),
                                           scores.row(q + 16 * warp + tile::lane_row(1), item.h)};
      // Keys that some query of this warpgroup sees by position.
      const auto visible = q < scores.seqlen_q ? narrow(sequence.band).keys_any(q, min(q + 64, scores.seqlen_q)) : BasicRange<i32>{0, 0};
      auto sees = [&](const Tile &t) { return t.begin < visible.end && t.end > visible.begin; };
      Given<C, Score> given(a, shared, scores, item.h, q + 16 * warp, w, warp);
      Line<C, Score> line(scores, rows[0].slope, given);
      Softcap softcap(scores);
      RowSoftmax<2> softmax;
      bool follows = true, rising = item.kind() == kAgain; // the reference follows the maxima, and always will

      // Q K^T of tile t, in S -> P, in S. value: where its V lies.
      auto softmax_of = [&](const Tile &t, const Stage<C> &value) {
        if constexpr (F.mask || F.bias) {
          if (item.kind() != kOnce) clear_nonfinite_v(value);
        }
        const bool natural = is_natural(item), scored = natural || (F.additive() && !kLine && !Softcap::kIs);
        if constexpr (kLine) {
          if (!scored) line.begin(S, q + 16 * warp, t.begin, t.end);
        }
        if constexpr (Softcap::kIs) softcap.begin(S);
        if (t.masked) {
          if constexpr (!F.mask && !F.bias) {
            if (item.kind() != kOnce) clear_nonfinite_v(value);
          }
          if (scored)
            score<true>(scores, rows, given, t);
          else
            hide(rows, t);
        } else if (scored) {
          score<false>(scores, rows, given, t);
        }
        given.mask.hide(S);
        auto exponentiate = [&](const auto &of) {
          if (follows) softmax.template follow<C.reference == kExact>(S, of);
          softmax.exponentiate(S, of);
        };
        if (natural)
          exponentiate(Natural{});
        else if constexpr (kLine)
          exponentiate(line);
        else if (Softcap::kIs && softcap.small)
          exponentiate(softcap);
        else
          exponentiate(Linear{Softcap::kIs ? softcap.cap : scores.unit});
        if constexpr (F.dropout) {
#pragma unroll
          for (int n = 0; n < kN / 32; ++n) dropout.draw(random[n], q + 16 * warp, t.begin + 32 * n);
        }
      };
      // Whether there is a tile after t to be computed; t becomes it.
      auto next = [&](Tile &t) {
        if (t.last) return false;
        if constexpr (C.reference == kFixed) {
          const float l = fmaxf(softmax.l[0], softmax.l[1]);
          if (__any_sync(0xFFFFFFFFu, !(l < kFar))) {
            rising = true;
            if (item.kind() == kOnce && !(l < kMost)) store_shared(shared.failed(verdicts), 1), store_shared(shared.lost(), items);
          }
          bool hidden = t.masked; // it may be that a row has seen nothing yet, or only keys beyond it, with ALiBi
          if constexpr (kLine && F.alibi) hidden = hidden || !line.before;
          if constexpr (F.mask || F.bias)
            hidden = hidden || __any_sync(0xFFFFFFFFu, fminf(softmax.M[0], softmax.M[1]) == minus_infinity<float>());
          follows = rising || (follows && hidden);
        }
        t = wait_tile(
            __any_sync(0xFFFFFFFFu, softmax.l[0] + softmax.l[1] < 0)); // it is not: but the compiler has to finish the softmax first
        given.mask.fetch(t.begin);
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
      given.mask.fetch(t.begin);
      if (any) {
        if (turn) wait_turn();
        registers_changed(S);
        wgmma_fence();
        multiply_q_k();
        wgmma_commit();
        if (turn) pass_turn();
        wgmma_wait<0>();
        registers_changed(S);
        given.bias.take(k.index);
        release(shared.k_empty(k.index));
        k.advance();
        softmax_of(t, v);
        round_p(dropout);
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
          given.bias.take(k.index);
          release(shared.k_empty(k.index));
          k.advance();
          const bool followed = follows;
          softmax_of(t, v.next());
          registers_changed(S);
          more = next(t); // its wait also keeps the compiler from waiting for P V before the softmax
          wgmma_wait<0>();
          registers_changed(O);
          registers_changed(P);
          release(shared.v_empty(v.index));
          v.advance();
          round_p(dropout);
          if (followed && softmax.moved()) softmax.rescale(O);
        }
        if constexpr (!C.q_in_registers) release(shared.q_empty(w));
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
        release(shared.q_empty(w));
      }
      if (!sees(t)) { // this one, and what follows it
        skip(turn || any);
        while (!t.last) {
          t = wait_tile();
          skip(true);
        }
      }
      finish(item, sequence, scores.seqlen_q, softmax, dropout.dropout.factor());
      if (item.kind() != kOnce) add_nonfinite(item, dropout.dropout);
    }

    // Scores and M are natural logarithms where a tile with a bias is computed again: as low as numbers go, and -inf whatever else there
    // is.
    static __device__ __forceinline__ bool is_natural(const Item &item) { return F.bias && item.kind() != kOnce; }

    __device__ __forceinline__ Tile wait_tile(bool other_parity = false) {
      mbarrier_wait(shared.k_full(k.index), k.parity ^ other_parity);
      return read<Tile>(shared.tile(k.index));
    }
    __device__ __forceinline__ void release(u32 empty) const {
      if (lane == 0) mbarrier_arrive(empty);
    }
    __device__ __forceinline__ void judge(bool failed) {
      const u32 n = verdicts++;
      if (failed) store_shared(shared.failed(n), 1);
      __syncwarp();
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
        ldmatrix(reinterpret_cast<u32(&)[4]>(Q[4 * c]),
                 q_address() + 64 * kRowBytes * (c / 4) + row * kRowBytes + ((chunk ^ row % 8) << 4));
      }
      __syncwarp();
      release(shared.q_empty(w));
    }

    // S = Q K^T
    __device__ __forceinline__ void multiply_q_k() {
      const u64 q = descriptor_k_major(q_address()), key = descriptor_k_major(shared.k + k.index * C.k_bytes());
#pragma unroll
      for (int c = 0; c < kD / 16; ++c) {
        const u64 b = advance(key, kN * kRowBytes * (c / 4) + 32 * (c % 4));
        if constexpr (C.q_in_registers) {
          c ? Wgmma<T, kN>::template registers<true, 0>(S, Q + 4 * c, b) : Wgmma<T, kN>::template registers<false, 0>(S, Q, b);
        } else {
          const u64 left = advance(q, 64 * kRowBytes * (c / 4) + 32 * (c % 4));
          c ? Wgmma<T, kN>::template shared<true>(S, left, b) : Wgmma<T, kN>::template shared<false>(S, left, b);
        }
      }
    }
    // O += P V
    __device__ __forceinline__ void multiply_p_v() {
      const u64 value = descriptor_mn_major(shared.v + v.index * C.v_bytes(), kN * kRowBytes);
#pragma unroll
      for (int n = 0; n < kN / 16; ++n) Wgmma<T, kDv>::template registers<true, 1>(O, P + 4 * n, advance(value, 16 * kRowBytes * n));
    }
    __device__ __forceinline__ void round_p(const QueryMajorDropout<F> &dropout) {
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
        if constexpr (F.dropout) P[i] = dropout.kept(P[i], random[i / 8][i / 4 % 2 * 2 + i % 2], i / 2 % 2);
      }
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
    __device__ __forceinline__ void score(const Score &scores, const Row (&rows)[2], const Given<C, Score> &given, const Tile &t) {
      const i32 column = t.begin + tile::lane_column(0, 0);
      const float distance[2] = {(float)(rows[0].i + scores.offset - column), (float)(rows[1].i + scores.offset - column)};
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        const i32 r = i / 2 % 2, j = i / 4 * 8 + i % 2;
        const typename Given<C, Score>::At at{given, {scores, rows[r], column + j}, i};
        S[i] = scores.score(S[i], rows[r], column + j, distance[r] - (float)j, at, kByPosition, t.end);
      }
    }

    // Infinities and NaN in a tile of V become 0, until add_nonfinite().
    __device__ __forceinline__ void clear_nonfinite_v(const Stage<C> &value) const {
      mbarrier_wait(shared.v_full(value.index), value.parity);
#pragma unroll 1
      for (i32 i = (i32)threadIdx.x % 128 * 4; i < C.v_bytes(); i += 128 * 4) { // a few registers: S, O, P and Q are in use
        const u32 place = shared.v + value.index * C.v_bytes() + i, x = load_shared(place), bad = spread(nonfinite<T>(x));
        if (bad) store_shared(place, x & ~bad);
      }
      async_proxy_fence();
      barrier_sync(kTogether + w, 128);
    }
    struct Results {
      const Compute &compute;
      const Item &item;
      i64 q0;
      i32 first, count; // of the sequence's queries
      __device__ __forceinline__ i32 query(i32 r) const { return first + r; }
      __device__ __forceinline__ i32 head(i32) const { return item.h; }
      __device__ __forceinline__ void add(i32 r, i32 c, float x) const {
        if constexpr (C.split) {
          compute.partial_out(item, q0 + query(r))[c] += x;
        } else {
          T *o = compute.a.out.template at<T>(item.b, item.h, q0 + query(r), c);
          *o = Convert<T>::from(to_float(*o) + x);
        }
      }
    };
    __device__ __forceinline__ void add_nonfinite(const Item &item, const Dropout<F> &dropout) const {
      const Sequence sequence = in.sequence(item.b); // again: nothing is kept in registers for this
      const Score scores(in, sequence, item.b);
      barrier_sync(kTogether + w, 128); // the results are in memory
      const i32 first = item.q + 64 * w;
      const Results results{*this, item, sequence.q0, first, min(64, scores.seqlen_q - first)};
      const Keys<T> value = v_of<T>(in, sequence, item.b, (i32)a.group_divisor.divide(item.h));
      BasicSchedule<i32> tiles = schedule<C>(a, narrow(sequence.band), item);
      BasicKeyTile<i32> t;
#pragma unroll 1
      while (tiles.next(t)) {
        if (F.mask || F.bias || t.masked || t.end - t.begin < kN)
          strobe::add_nonfinite<128>(scores, dropout, value, {t.begin, t.end}, {nullptr, 0, 0}, results, (int)threadIdx.x % 128);
      }
    }

    // A row of what this part of the keys makes of O.
    __device__ __forceinline__ float *partial_out(const Item &item, i64 row) const {
      return a.partial_out + (item.split() * in.rows() + in.row_index(item.b, item.h, row)) * in.head_dim_v;
    }
    // O / l and LSE to memory.
    __device__ __forceinline__ void finish(const Item &item, const Sequence &sequence, i32 seqlen_q, const RowSoftmax<2> &softmax,
                                           float factor) {
      const bool natural = is_natural(item);
      const float sink =
          !C.split && in.sinks ? *in.sinks.at<const float>(0, item.h, 0, 0) * (natural ? 1 : kLog2e<float>) : minus_infinity<float>();
      const i32 odd = lane % 2, column = 8 * odd + lane % 4 / 2 * 4;
      bool overflow = false, nonfinite = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const RowEnd end = row_end(softmax.M[r], tile::row_sum(softmax.l[r]), sink, natural);
        const i32 i = item.q + 64 * w + 16 * warp + tile::lane_row(r);
        overflow = overflow || (i < seqlen_q && C.reference == kFixed && !(softmax.l[r] < kMost));
        if constexpr (F.bias) overflow = overflow || (i < seqlen_q && softmax.M[r] == minus_infinity<float>()); // it may be low instead
        const i64 row = sequence.q0 + i;
        const float by = end.factor * factor;
        if constexpr (C.split) {
          if (i >= seqlen_q) continue;
          if (lane % 4 == 0) a.partial_lse[item.split() * in.rows() + in.row_index(item.b, item.h, row)] = end.lse;
          float *out = partial_out(item, row) + tile::lane_column(0, 0);
#pragma unroll
          for (int n = 0; n < kDv / 4; ++n) {
            const i32 c = n / 2 * 8 + n % 2;
            const float x = O[n / 2 * 4 + 2 * r + n % 2] * by;
            if (c + tile::lane_column(0, 0) < in.head_dim_v) out[c] = x;
            if (r == 0) nonfinite |= !(x - x == 0);
          }
        } else {
          if (a.lse && lane % 4 == 0 && i < seqlen_q) *a.lse.template at<float>(item.b, item.h, row, 0) = end.lse;
          T *out = a.out.template at<T>(item.b, item.h, row, 0) + column;
          const i32 columns = i < seqlen_q ? in.head_dim_v - column : 0;
          // Two lanes exchange halves of neighbouring blocks of 8 columns, so that each stores 8 bytes and all of them whole sectors.
          // Without branches: within one the compiler computes the address anew, and waits for each exchange.
          u32 zero = 0; // NaN if something is not finite
#pragma unroll
          for (int c = 0; c < kDv; c += 16) {
            const float *o = O + c / 2 + 2 * r;
            const u32 left = pack<T>(o[0] * by, o[1] * by), right = pack<T>(o[4] * by, o[5] * by);
            const u32 other = __shfl_xor_sync(0xFFFFFFFFu, odd ? left : right, 1);
            const u32 x = odd ? other : left, y = odd ? right : other;
            store_global_below(c, columns, out + c, x, y);
            if (r == 0)
              zero = multiply_add_pairs<T>(x, 0,
                                           multiply_add_pairs<T>(y, 0, zero)); // what is not finite in V is so in all rows of its columns
          }
          if (r == 0) nonfinite = i < seqlen_q && multiply_add_pairs<T>(zero, 0, 0) != 0;
        }
      }
      if (item.kind() == kOnce) judge(overflow || nonfinite);
    }
  };
};

} // namespace strobe::sm90
