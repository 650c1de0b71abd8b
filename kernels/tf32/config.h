// What a kernel of the tf32 family is compiled for: FP32 on tensor cores, each product as three TF32 products; sm_80 and later.
#pragma once
#include "../attention/features.h"

namespace strobe::tf32 {

struct Config {
  i32 head_dim, head_dim_v; // rounded up to multiples of 32
  i32 tile_q, tile_k;       // tile_q (backward: tile_k): a multiple of 16 * warps; the other one: a multiple of 32
  i32 warps;
  i32 stages;        // forward: tiles of K, and of V, in shared memory at a time
  i32 products;      // 3: as exact as FP32; 1: plain TF32
  i32 aligned;       // 16-byte copies: adjacent columns, rows and bases multiples of 16 bytes, head dims multiples of 4
  i32 exact_max;     // 1: the running maximum is followed exactly; 0: the reference may lag by a factor of 2^8
  i32 deterministic; // backward: key tiles add to dQ in turns
  i32 blocks_per_sm;
  Features features;

  STROBE_FN constexpr i32 threads() const { return 32 * warps; }
  // Bytes of shared memory. The forward's: Q, the stages of K, the stages of V, the schedule. The backward's: K, V, Q, dO, dS, three
  // numbers for each query, the schedule.
  STROBE_FN static constexpr i32 state_bytes() { return 512; }
  // state_bytes(), and two numbers for each row of each thread (Totals in forward.h).
  STROBE_FN constexpr i32 forward_state_bytes() const { return state_bytes() + 2 * (tile_q / warps / 8) * threads() * 4; }
  // The forward restarts O after this many tiles of keys: one sum over many keys would exceed FP32's error bound.
  STROBE_FN constexpr i32 tiles_of_run() const { return 512 / tile_k; }
  STROBE_FN constexpr i32 forward_shared_bytes() const {
    return 4 * (tile_q * head_dim + stages * tile_k * (head_dim + head_dim_v)) + forward_state_bytes();
  }
  STROBE_FN constexpr i32 backward_shared_bytes() const {
    return 4 * ((tile_k + tile_q) * (head_dim + head_dim_v) + tile_q * ds_pitch() + 3 * tile_q) + state_bytes();
  }
  STROBE_FN constexpr i32 ds_pitch() const { return tile_k + 8; } // in floats, so that pairs of a row are read without bank conflicts
};

} // namespace strobe::tf32
