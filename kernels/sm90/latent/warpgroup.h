// A warpgroup that computes. Both walk over the keys by pairs of tiles. Warpgroup w computes S and P of tile w of each pair, and keeps its
// half of the columns of O, to which it adds P V of both tiles.
#pragma once
#include "../../device/nonfinite.h"
#include "../../ptx/tma.h"
#include "shared.h"
#include "softmax.h"

namespace strobe::sm90::latent {

template <Config C, int kW> struct Warpgroup {
  using T = typename Element<C.dtype>::type;
  const Shared &shared;
  const Item &item;
  const int lane, warp;
  Softmax<C> softmax;
  Accumulator<T, kHalf> O;
  Accumulator<T, kKeys> S;
  LeftOperand<kKeys> P;

  __device__ __forceinline__ Warpgroup(const LatentArguments &a, const Shared &shared, const Item &item)
      : shared(shared), item(item), lane((int)threadIdx.x % 32), warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)),
        softmax(a, item, warp) {}

  // Starts another sum.
  __device__ __forceinline__ void restart() {
    O.clear();
    softmax.running = RowSoftmax<2>();
  }

  // Computes S of the warpgroup's tile of pair n, before the first step.
  __device__ __forceinline__ void begin(i32 n) {
    if (kW == 1 && !item.has_both(n)) return;
    if constexpr (kW == 1) barrier_sync(kTurn, 256);
    begin_q_k(n);
    wait_for<0>(S);
  }
  // O += P V over pair n. more: another pair follows. ahead: its S is computed too. ptxas serializes products that are in flight from one
  // iteration of a loop to the next, or beside which other sums are written to, so all products begin and end here.
  __device__ __forceinline__ void step(i32 n, bool more, bool ahead) {
    if constexpr (kW == 0)
      step_first(n, more, ahead);
    else
      step_second(n, more, ahead && item.has_both(n + 1));
  }

  __device__ __forceinline__ void together() const { barrier_sync(kTogether + kW, 128); }

private:
  __device__ __forceinline__ void step_first(i32 n, bool more, bool ahead) {
    if (item.has_both(n)) barrier_arrive(kTurn, 256);
    make_p(n);
    barrier_arrive(kP + 0, 256);
    rescale();
    O.begin_adding(P, shared.part(0, kW));
    wait_for<0>(O, P); // P of the second tile comes later in any case
    if (more) release(0);
    if (!item.has_both(n)) return;
    barrier_sync(kP + 1, 256);
    softmax.adopt(shared, 1);
    rescale();
    O.begin_adding(shared.part(1, kRest), shared.part(1, kW));
    if (ahead) {
      begin_q_k(n + 1);
      wait_for<1>(O);
      release(1);
    }
    wait_for<0>(S, O);
    if (more && !ahead) release(1);
  }
  // The first tile's P V runs while P of the second tile is computed.
  __device__ __forceinline__ void step_second(i32 n, bool more, bool ahead) {
    barrier_sync(kP + 0, 256);
    softmax.adopt(shared, 0);
    rescale();
    O.begin_adding(shared.part(0, kRest), shared.part(0, kW));
    if (!item.has_both(n)) return wait_for<0>(O);
    make_p(n);
    barrier_arrive(kP + 1, 256);
    wait_for<0>(O);
    release(0);
    rescale();
    O.begin_adding(P, shared.part(1, kW));
    wait_for<0>(O, P);
    if (more) release(1);
    if (!ahead) return;
    barrier_sync(kTurn, 256);
    begin_q_k(n + 1);
    wait_for<0>(S);
  }

  // Begins S = Q K^T with the warpgroup's tile of pair n, part by part, as they arrive.
  __device__ __forceinline__ void begin_q_k(i32 n) {
    const Descriptor rows(descriptor_k_major(shared.q)), columns(descriptor_k_major(shared.tile(kW)));
    registers_changed(S.x);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      mbarrier_wait(shared.full(kW, part), n % 2);
      wgmma_fence();
#pragma unroll
      for (int c = 4 * first_block(part); c < 4 * (first_block(part) + count_blocks(part)); ++c) {
        const u32 at = kBlockBytes * (c / 4) + 32 * (c % 4);
        if (c == 0)
          Wgmma<T, kKeys>::template shared<false>(S.x, rows.at(0), columns.at(0));
        else
          Wgmma<T, kKeys>::template shared<true>(S.x, rows.at(at), columns.at(at));
      }
    }
    wgmma_commit();
  }
  // Makes P of S, for this warpgroup in registers and for the other one in shared memory, in place of the columns of K that V lacks.
  __device__ __forceinline__ void make_p(i32 n) {
    const i32 key = item.key(n, kW);
    together(); // no warp reads the tile as K any more
    softmax.score(S.x, key, C.features.pages ? load_shared(shared.lacks(kW)) : 0u);
    const bool masked = softmax.masked(key);
    if (masked) clear_nonfinite(key);
    softmax.exponentiate(S.x, shared, kW);
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) P.x[i] = pack<T>(S.x[2 * i], S.x[2 * i + 1]);
    const int row = 16 * warp + lane % 16;
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c)
      stmatrix(shared.part(kW, kRest) + row * kRowBytes + ((2 * c + lane / 16 ^ row % 8) << 4), reinterpret_cast<u32(&)[4]>(P.x[4 * c]));
    async_proxy_fence();
    if (masked) together(); // no product reads a row of V before it is cleared
  }
  // Clears numbers that are not finite in those rows of V that some query does not see, because 0 times such a number is NaN. A query that
  // sees one has met it in K, so its score, and with it the whole result, is not finite either, unless the score is -inf.
  __device__ __forceinline__ void clear_nonfinite(i32 key) {
    const int thread = (int)threadIdx.x % 128;
    const i32 all = item.all.begin - key, end = min(item.all.end, item.any.end) - key;
#pragma unroll 1
    for (int i = thread; i < kKeys * kValues / 8; i += 128) { // 16 bytes at a time
      const int row = i / (kValues / 8);
      if (row >= all && row < end) continue;
      const u32 place = shared.tile(kW) + kBlockBytes * (i / 8 % (kValues / 64)) + kRowBytes * row + 16 * (i % 8);
      u32 x[4], here = 0;
      load_shared(x, place);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const u32 bad = spread(nonfinite<T>(x[w]));
        x[w] &= ~bad, here |= bad;
      }
      if (here) store_shared(place, x);
    }
    __syncwarp();
  }
  // O must be complete in registers.
  __device__ __forceinline__ void rescale() {
    if (softmax.running.moved()) softmax.running.rescale(O.x);
  }
  // Gives back this warpgroup's parts of tile w.
  __device__ __forceinline__ void release(int w) const {
    if (lane == 0) mbarrier_arrive(shared.empty(w, kW));
  }
};

} // namespace strobe::sm90::latent
