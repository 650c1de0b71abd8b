// Tensors as the copy engine of Hopper sees them.
#pragma once
#include <initializer_list>
#include <string>

#include "../../../kernels/ptx/tensor_map.h"
#include "attention/attention.h"
#include "cuda/program/addresses.h"

namespace strobe::cuda {

// Why the copy engine cannot fetch it; empty if it can.
std::string unmapped(const char *argument, const View &, int64_t columns);
// Why it cannot fetch boxes of their rows, where one row stands for all of a sequence; empty if none does.
std::string broadcast_row(std::initializer_list<const View *> of_queries, std::initializer_list<const View *> of_keys, const Problem &);

// Tensors with the rows of Q, or those of K. box: rows fetched at a time, 64 columns each, of box_heads heads. The driver encodes a map for
// an address, so until a run has one the map holds what it is to be made from: a request.
MappedOperand mapped_queries(const Problem &, const View &, int64_t columns, int32_t box, int32_t box_heads = 1);
MappedOperand mapped_keys(const Problem &, const View &, int64_t columns, int32_t box); // in a pool, pages stand in place of sequences
// Whether the copy engine can fetch the bias; it does not convert, so only one of q's dtype. box: queries fetched at a time; one where the
// bias is broadcast over them.
bool maps_bias(const Problem &);
MappedOperand mapped_bias(const Problem &, int32_t box);
bool is_request(const TensorMap &); // not so of a tensor that the call does not have
void encode(TensorMap &request, const Addresses &);

} // namespace strobe::cuda
