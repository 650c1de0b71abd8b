// Compute Sanitizer's racecheck reports races in a kernel that has none, where some warps arrive at a barrier without waiting (bar.arrive):
//
//   nvcc -arch=sm_90 -DWAIT=0 racecheck_arrive.cu -o arrive && compute-sanitizer --tool racecheck ./arrive     # races, in each run
//   nvcc -arch=sm_90 -DWAIT=1 racecheck_arrive.cu -o wait && compute-sanitizer --tool racecheck ./wait         # none
//
// Half of the warps are writers of P and readers of LSE, the other half the other way round, as in the backward of cuda-mma. All accesses
// of one iteration are ordered with those of the next one by a barrier of all warps. P is handed over by a barrier of its own, at which its
// writers need not wait: with WAIT they do so all the same, which orders no more of these accesses.
#include <cstdio>

constexpr int kThreads = 256, kHalf = kThreads / 2, kIterations = 6;

__device__ int barrier_of_all(int condition) { // whether it holds for one of them
  int any;
  asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %1, 0; bar.red.or.pred q, 0, 256, p; selp.b32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(condition)
               : "memory");
  return any;
}
__device__ void p_is_written() {
#if WAIT
  asm volatile("bar.sync 1, 256;" ::: "memory");
#else
  asm volatile("bar.arrive 1, 256;" ::: "memory");
#endif
}
__device__ void await_p() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

__global__ void __launch_bounds__(kThreads) hand_over(float *out, int work) {
  __shared__ float lse[2][kHalf], P[kHalf];
  const int t = threadIdx.x % kHalf;
  const bool writes_p = threadIdx.x < kHalf;
  float sum = 0;
  int any = 0;
  if (!writes_p) lse[0][t] = t;
  for (int n = 0; n < kIterations; ++n) {
    any = barrier_of_all(any);
    if (writes_p) {
      float p = lse[n % 2][t];
      for (int k = 0; k < work; ++k) p = p * 0.5f + k; // the roles take turns at being late
      P[t] = p;
      p_is_written();
      sum += p;
    } else {
      float next = n;
      for (int k = 0; k < work / 2; ++k) next = next * 0.5f + k;
      await_p();
      sum += P[t];
      lse[(n + 1) % 2][t] = next;
    }
  }
  out[blockIdx.x * kThreads + threadIdx.x] = sum + any;
}

int main() {
  constexpr int kBlocks = 176;
  float *out;
  cudaMalloc(&out, kBlocks * kThreads * sizeof(float));
  hand_over<<<kBlocks, kThreads>>>(out, 40);
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
