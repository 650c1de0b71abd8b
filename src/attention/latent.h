// Latent attention: V is the first columns of K.
#pragma once
#include <algorithm>
#include <iterator>

#include "attention/attention.h"
#include "kernels/attention/features.h"

namespace strobe {

// Whether V is the first columns of K, by address and strides, in heads so wide that an engine may use it.
inline bool is_latent(const Problem &p) {
  return p.k && p.v && !p.quantised() && p.k.data == p.v.data && p.head_dim_v <= p.head_dim && p.head_dim > kMostUsualDim &&
         std::equal(std::begin(p.k.stride), std::end(p.k.stride), p.v.stride);
}

} // namespace strobe
