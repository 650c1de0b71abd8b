// Measures the L2 cache under the load of the Hopper backward: every SM adds to tiles of 48 KB in FP32, as dQ is added up, and loads as
// many bytes.
//   nvcc -O3 -std=c++20 -gencode arch=compute_90a,code=sm_90a -I kernels -o l2_rates bench/l2_rates.cu && ./l2_rates
// docs/lab/hopper-backward.md, step 40, has the results of an H200.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

#include "ptx/barrier.h"
#include "ptx/ldmatrix.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

using namespace strobe;

constexpr int kTile = 48 * 1024, kPiece = 8192, kSteps = 400, kTiles = 400, kAdding = 256;

enum Adders { kNobody, kLanes, kCopyEngine };
enum Places { kOwn, kCommon }; // kOwn: each block has two tiles of its own; kCommon: 64 blocks walk over the same 64 tiles at the same time

template <Places places> __device__ long tile_of(int step) {
  return (places == kCommon ? blockIdx.x / 64 * 64 + step % 64 : blockIdx.x * 2 + step % 2) * (long)kTile;
}

template <Places places> __device__ void add_from_lanes(char *sums) {
  const float x[4] = {1e-9f, 1e-9f, 1e-9f, 1e-9f};
  for (int step = 0; step < kSteps; ++step) {
    for (int at = threadIdx.x / 32 * 512; at < kTile; at += kAdding * 16) add_quad((float *)(sums + tile_of<places>(step) + at), x);
  }
}
template <Places places> __device__ void add_by_copy_engine(char *sums, u32 source) {
  for (int step = 0; step < kSteps; ++step) {
    for (int at = 0; at < kTile; at += kPiece) bulk_add(sums + tile_of<places>(step) + at, source + at, kPiece);
    bulk_commit();
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); // two tiles in flight
  }
  bulk_wait();
}
template <Places places> __device__ void fetch(const char *source, u32 target, u32 barriers) {
  auto begin = [&](int step) {
    const u32 barrier = barriers + step % 2 * 8;
    mbarrier_expect(barrier, kTile);
    for (int at = 0; at < kTile; at += kPiece)
      bulk_load(target + step % 2 * kTile + at, source + tile_of<places>(step) + at, kPiece, barrier);
  };
  begin(0);
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) begin(step + 1);
    mbarrier_wait(barriers + step % 2 * 8, step / 2 % 2);
  }
}

template <Adders adders, bool fetches, Places places>
__global__ void __launch_bounds__(kAdding + 32) work(char *sums, const char *source, uint64_t *clocks) {
  extern __shared__ __align__(1024) char tiles[]; // one to add, two to load into
  __shared__ uint64_t barriers[2];
  if (threadIdx.x == 0) {
    for (uint64_t &barrier : barriers) mbarrier_init(shared_address(&barrier), 1);
    mbarrier_init_fence();
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
