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
// Features::function: the kernels' own form of the score where the caller's function is one of these, else kProgram or kAdded.
i32 function_of(const Problem &);
// Which it is, for messages.
const char *score_in_words(const Problem &);
// Makes the code of the caller's functions, once for all that asks for it.
void make_functions(Problem &);
// The source of the caller's functions, as far as kernels have no own form of them.
std::string functions_source(const Problem &);
// About how many instructions they take for a pair, where kernels have no own form of them.
int32_t function_instructions(const Problem &);
// Up to this scale kernels apply the scale in exp2's argument. There, the rounding of scores of 2^31 and more would become a factor outside
// FP32's range, so a larger scale is applied to the scores. Kernels on tensor cores apply every scale in the argument and refuse a larger
// one: outsized_scale() returns the reason, or nothing if the scale is not larger.
inline constexpr double kMostScale = 1e4;
std::string outsized_scale(const Problem &);
ForwardArguments forward_arguments(const Problem &);   // without the split over keys
BackwardArguments backward_arguments(const Problem &); // without the workspace
AuxiliaryArguments auxiliary_arguments(const Problem &);
KeyScales key_scales(const Problem &); // the scales of quantised keys

// Whether base and rows lie on 16-byte addresses and a row's elements are adjacent: tiles may then be copied 16 bytes at a time.
bool aligned(const View &, int64_t row_elements);
bool aligned(std::initializer_list<const View *>, int64_t row_elements);
bool aligned_keys(const Problem &);     // K and V, quantised or not
bool aligned_backward(const Problem &); // all tensors that a backward copies this way

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
