// What the L2 cache does for the Hopper backward: every SM adds to tiles of 48 KB in FP32, as dQ is added up, and fetches as many bytes.
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o l2_rates bench/l2_rates.cu && ./l2_rates
// docs/lab/hopper-backward.md, step 40, has what an H200 gives.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

constexpr int kTile = 48 * 1024, kPiece = 8192, kSteps = 400, kTiles = 400, kAdding = 256;

enum Adders { kNobody, kLanes, kCopyEngine };
enum Places { kOwn, kCommon }; // two tiles of each block's own; or 64 that 64 blocks walk over at the same time

__device__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

template <Places places> __device__ long tile_of(int step) {
  return (places == kCommon ? blockIdx.x / 64 * 64 + step % 64 : blockIdx.x * 2 + step % 2) * (long)kTile;
}

template <Places places> __device__ void add_from_lanes(char *sums) {
  for (int step = 0; step < kSteps; ++step) {
    for (int at = threadIdx.x * 16; at < kTile; at += kAdding * 16)
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(sums + tile_of<places>(step) + at), "f"(1e-9f)
                   : "memory");
  }
}
template <Places places> __device__ void add_by_copy_engine(char *sums, unsigned source) {
  for (int step = 0; step < kSteps; ++step) {
    for (int at = 0; at < kTile; at += kPiece)
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums + tile_of<places>(step) + at),
                   "r"(source + at), "r"(kPiece)
                   : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 1;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
template <Places places> __device__ void fetch(const char *source, unsigned target, unsigned barriers) {
  auto begin = [&](int step) {
    const unsigned barrier = barriers + step % 2 * 8;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kTile) : "memory");
    for (int at = 0; at < kTile; at += kPiece)
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target + step % 2 * kTile + at),
          "l"(source + tile_of<places>(step) + at), "r"(kPiece), "r"(barrier)
          : "memory");
  };
  begin(0);
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) begin(step + 1);
    asm volatile("{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}" ::"r"(
                     barriers + step % 2 * 8),
                 "r"(step / 2 % 2)
                 : "memory");
  }
}

template <Adders adders, bool fetches, Places places>
__global__ void __launch_bounds__(kAdding + 32) work(char *sums, const char *source, uint64_t *clocks) {
  extern __shared__ __align__(1024) char tiles[]; // one to add, two to fetch to
  __shared__ uint64_t barriers[2];
  if (threadIdx.x == 0) {
    for (uint64_t &barrier : barriers) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  const uint64_t begin = clock64();
  if (fetches && threadIdx.x == kAdding) fetch<places>(source, shared_address(tiles + kTile), shared_address(barriers));
  if (adders == kLanes && threadIdx.x < kAdding) add_from_lanes<places>(sums);
  if (adders == kCopyEngine && threadIdx.x == 0) add_by_copy_engine<places>(sums, shared_address(tiles));
  __syncthreads();
  if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - begin;
}

template <Adders adders, bool fetches, Places places> void measure(const char *name, int sms, char *sums, const char *source) {
  uint64_t *clocks;
  cudaMallocManaged(&clocks, sms * sizeof *clocks);
  cudaFuncSetAttribute(work<adders, fetches, places>, cudaFuncAttributeMaxDynamicSharedMemorySize, 3 * kTile);
  for (int i = 0; i < 3; ++i) work<adders, fetches, places><<<sms, kAdding + 32, 3 * kTile>>>(sums, source, clocks);
  cudaDeviceSynchronize();
  const double of_tile = double(*std::max_element(clocks, clocks + sms)) / kSteps;
  std::printf("%-36s %-7s %6.0f clocks a tile, %5.1f bytes a clock and SM: %s\n", name, places == kCommon ? "common" : "own", of_tile,
              kTile * ((adders != kNobody) + fetches) / of_tile, cudaGetErrorString(cudaGetLastError()));
  cudaFree(clocks);
}
template <Places places> void measure_all(int sms, char *sums, const char *source) {
  measure<kNobody, true, places>("fetched", sms, sums, source);
  measure<kLanes, false, places>("added from registers", sms, sums, source);
  measure<kCopyEngine, false, places>("added by the copy engine", sms, sums, source);
  measure<kLanes, true, places>("added from registers, and fetched", sms, sums, source);
  measure<kCopyEngine, true, places>("added by the copy engine, and fetched", sms, sums, source);
}

int main() {
  int sms;
  char *sums, *source;
  if (cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0) || cudaMalloc(&sums, kTiles * kTile) ||
      cudaMalloc(&source, kTiles * kTile) || 2 * sms > kTiles)
    return 1;
  cudaMemset(sums, 0, kTiles * kTile), cudaMemset(source, 0, kTiles * kTile);
  measure_all<kOwn>(sms, sums, source);
  measure_all<kCommon>(sms, sums, source);
}
