// From a Problem to kernel arguments.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <string>

#include "../../../kernels/attention/arguments.h"
#include "../../../kernels/attention/features.h"
#include "../../../kernels/attention/quantised.h"
#include "attention/attention.h"

namespace strobe::cuda {

Operand operand(const View &);
Features features_of(const Problem &);
// Features::function: the kernels' own form of the score if the caller's function is one of these, else kProgram or kAdded.
i32 function_of(const Problem &);
// The same in words, for messages.
const char *score_in_words(const Problem &);
// Makes the code of the caller's functions, once for all that asks for it.
void make_functions(Problem &);
// The source of those functions of the caller for which kernels have no form of their own.
std::string functions_source(const Problem &);
// How many instructions these functions take for a pair, roughly.
int32_t function_instructions(const Problem &);
// Whether kernels may fetch what is computed ahead (CudaFunctions::fetchable).
bool fetches_ahead(const Problem &);
// Up to this scale kernels apply the scale in exp2's argument. With a larger scale, the rounding of scores of 2^31 and more would there
// become a factor outside FP32's range, so a larger scale is applied to the scores. Kernels on tensor cores apply every scale in the
// argument and refuse a larger one: outsized_scale() returns the reason, or nothing if the scale is not too large.
inline constexpr double kMostScale = 1e4;
std::string outsized_scale(const Problem &);
// The same of the passes that make the gradients of captured tensors, whose code is not that of the call's other kernels.
Features gradient_features(const Problem &);
std::string gradient_functions_source(const Problem &);
int32_t gradient_instructions(const Problem &);
FunctionArguments gradient_function_arguments(const Problem &);
Inputs all_inputs(const Problem &);
ForwardArguments forward_arguments(const Problem &);   // except for the split of the keys
BackwardArguments backward_arguments(const Problem &); // except for the workspace
AuxiliaryArguments auxiliary_arguments(const Problem &);
KeyScales key_scales(const Problem &); // the scales of quantised keys

// Whether base and rows lie at 16-byte addresses and a row's elements are adjacent. Tiles may then be copied 16 bytes at a time.
bool aligned(const View &, int64_t row_elements);
bool aligned(std::initializer_list<const View *>, int64_t row_elements);
bool aligned_keys(const Problem &);     // K and V, quantised or not
bool aligned_backward(const Problem &); // the same for all tensors that a backward copies

inline int32_t rounded(int64_t dim, int32_t unit) { return int32_t((dim + unit - 1) / unit * unit); }

// The least dimension of the tiles for wide heads.
inline constexpr int32_t kWide = kMostUsualDim + 1;
inline bool wide(const Problem &p) { return strobe::wide(i32(p.head_dim), i32(p.head_dim_v)); }

// Sets the members that all kernels' Configs begin with; head dimensions are rounded up to multiples of dim_unit.
template <class Config> Config begin_config(const Problem &p, int32_t dim_unit) {
  Config c{};
  if constexpr (requires { c.dtype; }) c.dtype = int32_t(p.dtype);
  c.head_dim = rounded(p.head_dim, dim_unit), c.head_dim_v = rounded(p.head_dim_v, dim_unit);
  return c;
}

// The number of tiles of `tile` rows in a sequence of this length.
inline int64_t tiles(int64_t seqlen, int64_t tile) { return (seqlen + tile - 1) / tile; }

} // namespace strobe::cuda
