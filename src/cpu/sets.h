// The kernels of each instruction set. Sets that this library is built without are only declared.
#pragma once
#include "attention/attention.h"

namespace strobe {

struct CpuKernels;

namespace baseline {
const CpuKernels *kernels(DType);
}
namespace avx2 {
const CpuKernels *kernels(DType);
}
namespace avx512 {
const CpuKernels *kernels(DType);
}
namespace avx512bf16 {
const CpuKernels *kernels(DType);
}
namespace amx {
const CpuKernels *kernels(DType);
}
namespace neon {
const CpuKernels *kernels(DType);
}

} // namespace strobe
