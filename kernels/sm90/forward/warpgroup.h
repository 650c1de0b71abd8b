// A consumer warpgroup of the forward: the matrices in its registers, its current stages of shared memory, and its messages to the block's
// other threads.
#pragma once
#include "../../ptx/wgmma.h"
#include "../accumulator.h"
#include "shared.h"

namespace strobe::sm90 {

template <Config C> struct Warpgroup {
  using T = typename Element<C.dtype>::type;
  using Operand = typename Either<C.eight_bits != 0, e4m3, T>::type;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kN = C.tile_k;
  // Named barriers: at kTurn + w, warpgroup w waits until it may issue products; at kTogether + w all its threads meet.
  static constexpr int kTurn = 1, kTogether = kTurn + C.warpgroups;

  const HopperForwardArguments &a;
  const Inputs &in;
  const SharedMemory<C> &shared;
  const int w, lane, warp; // the warpgroup's number; the warp's number within it
  Stage<C> k{}, v{};       // the stages that the next tiles of K and V use
  u32 items = 0, verdicts = 0;
  Accumulator<T, kDv> O;
  Accumulator<Operand, kN> S;
  LeftOperand<C.eight_bits ? kN / 2 : kN> P;
  Accumulator<Operand, C.eight_bits ? kDv : 2> O_of_tile; // with eight_bits: P V of a tile
  LeftOperand<C.q_in_registers ? kD : 4> Q;

  __device__ __forceinline__ Warpgroup(const HopperForwardArguments &a, const SharedMemory<C> &shared, int w)
      : a(a), in(a.in), shared(shared), w(w), lane((int)threadIdx.x % 32), warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)) {}

  __device__ __forceinline__ u32 q_address() const { return shared.q + 64 * w * 2 * C.columns(); }
  __device__ __forceinline__ void load_q() {
    load_left<64>(Q, q_address(), 16 * warp, lane);
    __syncwarp();
    release(shared.q_empty(w));
  }
  // S = Q K^T with the next tile of K, which has arrived.
  __device__ __forceinline__ void begin_q_k() {
    const u32 key = shared.k + k.index * C.k_bytes();
    if constexpr (C.q_in_registers)
      S.template begin_product<Place::kept>(Q, key);
    else
      S.template begin_product<C.product_columns(), 64, Place::kept>(q_address(), key);
  }
  // O += P V with the next tile of V, once it has arrived.
  __device__ __forceinline__ void begin_p_v() {
    mbarrier_wait(shared.v_full(v.index), v.parity);
    const u32 value = shared.v + v.index * C.v_bytes();
    if constexpr (C.eight_bits) {
      P.done();
      O_of_tile.template begin_product<Place::free>(P, value);
    } else {
      O.begin_adding(P, value);
    }
  }
  __device__ __forceinline__ void end_p_v() {
    if constexpr (C.eight_bits)
      wait_for<0>(O_of_tile, P);
    else
      wait_for<0>(O, P);
  }

  __device__ __forceinline__ void release(u32 empty) const {
    if (lane == 0) mbarrier_arrive(empty);
  }
  __device__ __forceinline__ void release_k() {
    release(shared.k_empty(k.index));
    k.advance();
  }
  __device__ __forceinline__ void release_v() {
    release(shared.v_empty(v.index));
    v.advance();
  }
  // Waits for the next tile of K.
  __device__ __forceinline__ Tile wait_tile(bool other_parity = false) {
    mbarrier_wait(shared.k_full(k.index), k.parity ^ other_parity);
    return read<Tile>(shared.tile(k.index));
  }
  // Skips the next tile, which this warpgroup does not see.
  __device__ __forceinline__ void skip_tile(bool turn) {
    if (turn) {
      wait_turn();
      pass_turn();
    }
    __syncwarp();
    release_k();
    mbarrier_wait(shared.v_full(v.index), v.parity);
    release_v();
  }
  // Reports to assign.h whether the query tile failed and must be computed again.
  __device__ __forceinline__ void judge(bool failed) {
    const u32 n = verdicts++;
    if (failed) store_shared(shared.failed(n), 1);
    __syncwarp();
    release(shared.judged(n));
  }

  __device__ __forceinline__ void first_turn() const {
    if (C.warpgroups > 1 && w == C.warpgroups - 1) barrier_arrive(kTurn, 256); // warpgroup 0 comes next
  }
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (C.warpgroups > 1) barrier_sync(kTurn + w, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (C.warpgroups > 1) barrier_arrive(kTurn + (w + 1 == C.warpgroups ? 0 : w + 1), 256);
  }
  __device__ __forceinline__ void together() const { barrier_sync(kTogether + w, 128); }
};

} // namespace strobe::sm90
