// Q in FP8, dequantised to the call's dtype before the other kernels read it: x * scale in FP32, rounded once.
#pragma once
#include "quantised.h"

namespace strobe::inline STROBE_ISA {

// Row i of head h of batch b.
inline void dequantise_query(const Problem &p, int64_t b, int64_t h, int64_t i, void *to) {
  const float scale = load_as<float>(p.q_scale.dtype, p.q_scale.data, p.q_scale.index(b, h, i, 0));
  const E4M3 *from = p.q.at<E4M3>(b, h, i, 0);
  const auto convert = [&](auto *row) __attribute__((always_inline)) {
    for (int64_t c = 0; c < p.head_dim; c++) narrow(widen(from[c * p.q.stride[3]]) * scale, row[c]);
  };
  p.dtype == DType::f16 ? convert(static_cast<Half *>(to)) : convert(static_cast<BFloat16 *>(to));
}

} // namespace strobe::inline STROBE_ISA
