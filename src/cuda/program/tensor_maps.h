// Tensors as Hopper's copy engine sees them.
#pragma once
#include <initializer_list>
#include <string>

#include "../../../kernels/ptx/tensor_map.h"
#include "attention/attention.h"
#include "cuda/program/addresses.h"

namespace strobe::cuda {

// The reason why the copy engine cannot load it; empty if it can.
std::string unmapped(const char *argument, const View &, int64_t columns);
// The reason why it cannot load boxes of their rows, if one row stands for all of a sequence; empty if none does.
std::string broadcast_row(std::initializer_list<const View *> of_queries, std::initializer_list<const View *> of_keys, const Problem &);

// Tensors with the rows of Q, or those of K. box: rows loaded at a time, 64 columns each, of box_heads heads. The driver encodes a map for
// an address, so until a run has one the map holds its inputs: a request.
MappedOperand mapped_queries(const Problem &, const View &, int64_t columns, int32_t box, int32_t box_heads = 1);
MappedOperand mapped_keys(const Problem &, const View &, int64_t columns, int32_t box); // in a pool, pages take the place of sequences
// Whether the copy engine can load the bias; it does not convert, so bias must have q's dtype. box: queries loaded at a time; one if the
// bias is broadcast over them.
bool maps_bias(const Problem &);
MappedOperand mapped_bias(const Problem &, int32_t box);
bool is_request(const TensorMap &); // false for a tensor that the call does not have
void encode(TensorMap &request, const Addresses &);

} // namespace strobe::cuda
