// kernels(dtype) of an instruction set that computes with fused multiply-adds.
#pragma once
#include "kernels.h"
#include "program.h"

namespace strobe::inline STROBE_ISA {

const CpuKernels *kernels(DType dtype) {
  constexpr TileSizes forward{128, 128, 64}, backward{256, 128, 64}; // Br, Bc, lanes: measured (docs/lab/performance.md)
  static constexpr CpuKernels single = kernels_of<Fma<float>>("fp32 multiply-add", forward, backward, run_program<float>),
                              twice = kernels_of<Fma<double>>("fp64 multiply-add", forward, backward, run_program<double>);
  return dtype == DType::f64 ? &twice : &single;
}

} // namespace strobe::inline STROBE_ISA
