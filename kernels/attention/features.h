// What of the contract a kernel must know when it is compiled. All else (lengths, strides, scale, window, GQA, varlen, sinks) are
// arguments.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

// Values of Features::function. Other than kLinear, gradients by x need the function's slope, which is never negative.
inline constexpr i32 kLinear = 0, kSoftcap = 1, kHyperbolic = 2;

// Values of Features::part: ranges begin at multiples of 16, or some of them elsewhere.
enum Starts : i32 { kAligned = 1, kAnywhere = 2 };

// Values of Features::seqused. kCounted: seqused_k says how many keys of each sequence count; kPaged: K and V lie in pages, with or without
// a seqused_k.
inline constexpr i32 kCounted = 1, kPaged = 2;

// int32 fields only: a kernel's Config holds one, and its bytes are the key that the compiled kernel is cached under.
struct Features {
  i32 band;   // causal or a window: which keys are visible differs from query to query
  i32 blocks; // block-sparse
  i32 mask;   // a bool tensor
  i32 bias;   // 0: none; else the strobe_dtype of the tensor
  i32 alibi;
  i32 function; // what becomes of x = scale q.k: kLinear, kSoftcap or kHyperbolic
  i32 scaled;   // the scale cannot be left to exp2's argument: not positive, too small or too large; kHyperbolic: it is not 1
  i32 dropout;
  i32 seqused;   // how the keys of a sequence are found and counted: kCounted, kPaged; 0: all that the tensors hold
  i32 part;      // of a larger problem (part.h): kAligned, kAnywhere, or 0
  i32 partial;   // of a part: results are fp32 (fp64 if q is), LSE two numbers; the backward takes both, and D, of the whole row
  i32 adds;      // gradients are fp32 (fp64 if q is) and added to what is there
  i32 quant;     // how quantised K and V are stored: kInt8, kE4M3, kInt4; 0: they have q's dtype
  i32 by_column; // of quantised K: scales are those of columns, not of rows

  // Scores are kept in their own unit, else as raw q.k with the scale left to exp2's argument.
  STROBE_FN constexpr bool additive() const { return bias || alibi || function || scaled; }
  // dq, dk and dv have the type of sums, not that of q.
  STROBE_FN constexpr bool unrounded_gradients() const { return partial || adds; }
};

// What a score, as it is kept, is multiplied by to be a natural logarithm.
template <Features F, class T> STROBE_FN constexpr T natural_factor(T scale) { return F.additive() ? T(1) : scale; }

// Columns over which FP32 and FP64 sum D and dP in one run: where they cancel, what longer runs round shows.
inline constexpr i32 kRunOfColumns = 32;

// Head dimensions beyond this one are called wide. Their rows are too many registers for the ways in which kernels are cut up to here.
inline constexpr i32 kMostUsualDim = 256;
STROBE_FN constexpr bool wide(i32 head_dim, i32 head_dim_v) { return max(head_dim, head_dim_v) > kMostUsualDim; }

// As strobe_dtype.
inline constexpr i32 kF32 = 1, kF16 = 2, kBF16 = 3, kF64 = 4, kInt8 = 8, kE4M3 = 9, kInt4 = 10;
STROBE_FN constexpr i32 element_bytes(i32 dtype) { return dtype == kF64 ? 8 : dtype == kF32 ? 4 : 2; }

} // namespace strobe::inline STROBE_ISA
