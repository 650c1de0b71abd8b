// Packs a bool mask into bits (kernels/device/mask_bits.h) in a launch before the main one.
#pragma once
#include "../../../kernels/device/mask_bits.h"
#include "attention/attention.h"
#include "cuda/program/addresses.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// by_queries: the order in which the forward's lanes hold S. by_keys: the order in which the backward's lanes hold S^T.
enum class MaskOrder { by_queries, by_keys };
// The launch that packs the mask; `bits` receives the address and strides of the packed mask.
Launch pack_mask(const Problem &, const Inputs &, MaskOrder, MaskBits &bits, Scratch &);

} // namespace strobe::cuda
