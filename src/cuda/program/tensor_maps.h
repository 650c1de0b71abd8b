// Tensors as Hopper's copy engine reads them.
#pragma once
#include <initializer_list>
#include <string>

#include "../../../kernels/ptx/tensor_map.h"
#include "attention/attention.h"
#include "cuda/program/addresses.h"

namespace strobe::cuda {

// The reason why the copy engine cannot load this tensor; empty if it can.
std::string unmapped(const char *argument, const View &, int64_t columns);
// The reason why the copy engine cannot load boxes of rows: one row of a tensor stands for all rows of a sequence. Empty if it can.
std::string broadcast_row(std::initializer_list<const View *> of_queries, std::initializer_list<const View *> of_keys, const Problem &);

// Maps of tensors with Q's rows, or with K's rows. box: how many rows are loaded at a time, in 64 columns of box_heads heads. The driver
// encodes a map for an address. Until a run has the address, the map holds the inputs of the encoding: a request.
MappedOperand mapped_queries(const Problem &, const View &, int64_t columns, int32_t box, int32_t box_heads = 1);
MappedOperand mapped_keys(const Problem &, const View &, int64_t columns, int32_t box); // in a pool, pages count as sequences
// Whether the copy engine can load the bias. It does not convert, so the bias must have q's dtype.
bool maps_bias(const Problem &);
// box: how many queries are loaded at a time; 1 if the bias is broadcast over queries.
MappedOperand mapped_bias(const Problem &, int32_t box);
bool is_request(const TensorMap &); // false also for a tensor that the call does not have
void encode(TensorMap &request, const Addresses &);

} // namespace strobe::cuda
