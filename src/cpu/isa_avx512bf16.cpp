#define STROBE_ISA avx512bf16
#define STROBE_VECTOR_BYTES 64
#include "dot.h"
#include "kernels.h"

namespace strobe::inline STROBE_ISA {

const CpuKernels *kernels(DType dtype) {
  static constexpr CpuKernels bf16 = kernels_of<Pairs<1, Dot>>("bf16 dot products", {128, 128, 64}, {128, 64, 64});
  return dtype == DType::bf16 ? &bf16 : nullptr;
}

} // namespace strobe::inline STROBE_ISA
