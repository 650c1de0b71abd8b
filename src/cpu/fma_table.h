// The table of a set that computes by fused multiply-add.
#pragma once
#include "kernels.h"

namespace strobe::inline STROBE_ISA {

const CpuKernels *kernels(DType dtype) {
  constexpr TileSizes tile{64, 64, 64};
  static constexpr CpuKernels single = kernels_of<Fma<float>>("fp32 multiply-add", tile, tile),
                              twice = kernels_of<Fma<double>>("fp64 multiply-add", tile, tile);
  return dtype == DType::f64 ? &twice : &single;
}

} // namespace strobe::inline STROBE_ISA
