// A kernel as jit.h describes it.
#pragma once
#include "attention/base.h"
#include "piece.h"

namespace test {

struct Config {
  int add, times;
};

template <Config C> struct Plain {
  struct Arguments {
    float *values;
    strobe::i64 count;
  };
  static constexpr int kThreads = 128, kBlocksPerSm = 2;

  __device__ static void run(const Arguments &a) {
    const strobe::i64 i = blockIdx.x * (strobe::i64)kThreads + threadIdx.x;
    if (i < a.count) a.values[i] = piece(a.values[i], C.add) * C.times;
  }
};

} // namespace test
