// The table of a set that computes by fused multiply-add.
#pragma once
#include "kernels.h"

namespace strobe::inline STROBE_ISA {

const CpuKernels *kernels(DType dtype) {
  static constexpr CpuKernels single = kernels_of<Fma<float>>("fp32 multiply-add"), twice = kernels_of<Fma<double>>("fp64 multiply-add");
  return dtype == DType::f64 ? &twice : &single;
}

} // namespace strobe::inline STROBE_ISA
