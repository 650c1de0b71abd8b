// A wgmma whose registers are accessed before the wait. ptxas serialises it and says so.
extern "C" __global__ void kernel(float *out, unsigned long long a, unsigned long long b) {
  float x[4] = {1, 2, 3, 4};
  for (int i = 0; i < 4; ++i) {
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
                 : "l"(a), "l"(b));
    x[0] += 1;
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
  }
  out[threadIdx.x] = x[0] + x[1] + x[2] + x[3];
}
