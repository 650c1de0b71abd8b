// Compute Sanitizer's racecheck reports races in a kernel that has none, where some warps arrive at a barrier without waiting (bar.arrive):
//
//   nvcc -arch=sm_90 -DWAIT=0 racecheck_arrive.cu -o arrive && compute-sanitizer --tool racecheck ./arrive     # races in 8 of 8 runs
//   nvcc -arch=sm_90 -DWAIT=1 racecheck_arrive.cu -o wait && compute-sanitizer --tool racecheck ./wait         # none in 8 of 8
//
// Half of the warps write P and read LSE, the other half the other way round, as in the backward of cuda-mma. A barrier of all warps orders
// the accesses of one iteration and those of the next. P is passed on through a barrier of its own, at which its writers need not wait:
// with WAIT they wait nevertheless, which orders no more of these accesses.
#include <cstdio>
#include <cuda_runtime.h>

__device__ __forceinline__ int barrier_of_all(int condition) { // whether it holds for some thread
  int any = 0;
  asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %1, 0; bar.red.or.pred q, 0, 256, p; selp.b32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(condition)
               : "memory");
  return any;
}
__device__ __forceinline__ void arrive(int barrier) { asm volatile("bar.arrive %0, 128;" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void wait(int barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }

extern "C" __global__ void __launch_bounds__(256) kernel(const float *x, float *out, int tiles, int work) {
  __shared__ float lse[2][64], P[128];
  int t = threadIdx.x, role = t / 128, pair = t / 64 % 2;
  float sum = 0;
  if (role == 0) {
    int any = 0;
    barrier_of_all(0);
    for (int n = 0; n < tiles; ++n) {
      if (n > 0) any = barrier_of_all(any);
      float p = lse[n % 2][t % 64];
      for (int k = 0; k < work; ++k) p = p * 1.0001f + x[k];
      P[t] = p;
      WAIT ? wait(1 + pair) : arrive(1 + pair);
      sum += p;
    }
  } else {
    int any = 0;
    if (t < 192) lse[0][t - 128] = x[t];
    barrier_of_all(0);
    for (int n = 0; n < tiles; ++n) {
      if (n > 0) any = barrier_of_all(any);
      float next = x[(t + n) % 256];
      for (int k = 0; k < work / 2; ++k) next = next * 1.0001f + x[k];
      wait(1 + pair);
      sum += P[t - 128];
      if (t < 192) lse[(n + 1) % 2][t - 128] = next;
    }
  }
  barrier_of_all(0);
  out[blockIdx.x * 256 + t] = sum;
}

int main() {
  float *x, *out;
  cudaMalloc(&x, 4096 * 4), cudaMalloc(&out, 4096 * 256 * 4), cudaMemset(x, 0, 4096 * 4);
  for (int i = 0; i < 2; ++i) kernel<<<176, 256>>>(x, out, 6, 40);
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
