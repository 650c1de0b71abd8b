#define STROBE_ISA amx
#define STROBE_VECTOR_BYTES 64
#include "amx.h"
#include "kernels.h"

namespace strobe::inline STROBE_ISA {

const CpuKernels *kernels(DType dtype) {
  // Br, Bc, lanes: measured (docs/lab/performance.md)
  constexpr TileSizes forward{256, 256, 32}, backward{256, 128, 32};
  static constexpr CpuKernels bf16 = kernels_of<Pairs<1, Amx>>("bf16 tiles", {128, 256, 64}, {256, 256, 32}),
                              fp16 = kernels_of<Pairs<2, Amx>>("fp16 as two bf16 tiles, three products", forward, backward),
                              fp32 = kernels_of<Pairs<3, Amx>>("fp32 as three bf16 tiles, six products", forward, backward);
  return dtype == DType::bf16 ? &bf16 : dtype == DType::f16 ? &fp16 : dtype == DType::f32 ? &fp32 : nullptr;
}

} // namespace strobe::inline STROBE_ISA
