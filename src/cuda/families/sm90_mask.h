// A bool mask packed into bits (kernels/device/mask_bits.h) by a launch before the main one.
#pragma once
#include "../../../kernels/device/mask_bits.h"
#include "attention/attention.h"
#include "cuda/program/addresses.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// As the forward's lanes hold S, or as the backward's hold S^T.
enum class MaskOrder { by_queries, by_keys };
// What packs it; `bits` will say where.
Launch pack_mask(const Problem &, const Inputs &, MaskOrder, MaskBits &bits, Scratch &);

} // namespace strobe::cuda
