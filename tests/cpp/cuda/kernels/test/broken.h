#pragma once
namespace test {
struct Config {
  int add, times;
};
template <Config C> struct Broken {
  struct Arguments {
    float *values;
  };
  static constexpr int kThreads = 128, kBlocksPerSm = 1;
  __device__ static void run(const Arguments &a) { does_not_compile(a); }
};
} // namespace test
