// The options that a kernel is compiled for. A Config holds them, beside members that belong to its family (tiles, dtype, `invariant`,
// ...). The values that an option needs, and all other options (lengths, strides, scale, window, GQA, varlen, sinks), are arguments
// (arguments.h).
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

// Values of Features::function. kCapped: c tanh(x / c). kProgram: a function of the caller. kAdded: a function of the caller that adds
// something to x, so that its derivative by x is 1. Only kProgram's derivative may be negative.
inline constexpr i32 kLinear = 0, kCapped = 1, kHyperbolic = 2;
enum : i32 { kProgram = 3, kAdded = 4 };

// Bits of Features::penalty. kDistance: the head's slope times |i + offset - j| is subtracted from what `function` gives; with kSigned the
// distance has its sign, and with kFromZero it does not count the offset.
enum Penalty : i32 { kDistance = 1, kSigned = 2, kFromZero = 4 };

// A value of Features::blocks.
enum : i32 { kFullKnown = 2 };

// Values of Features::part. kAligned: all ranges begin at multiples of 16. kAnywhere: they may begin anywhere.
enum Starts : i32 { kAligned = 1, kAnywhere = 2 };

// All members are int32: a kernel's Config holds a Features, and the Config's bytes are part of the key of the kernel cache.
struct Features {
  i32 band;     // causal or a window: visible keys differ from query to query
  i32 blocks;   // a block-sparse mask; kFullKnown: the call says which blocks the function of the mask sees as a whole
  i32 mask;     // a bool mask tensor
  i32 bias;     // 0: none; else the strobe_dtype of the bias tensor
  i32 penalty;  // ALiBi: bits of Penalty; 0: none
  i32 function; // the function of x = scale q.k: kLinear, kCapped, kHyperbolic, kProgram or kAdded
  i32 scaled;   // the scale cannot be folded into exp2's argument: it is not positive, too small or too large. kHyperbolic: it is not 1
  i32 dropout;
  i32 seqused; // seqused_k says how many keys of each sequence count; always 0 with pages
  i32 pages;   // K and V lie in pages; whether there is a seqused_k is known at run time
  i32 part;    // the tensors hold a part of a larger problem (part.h): kAligned, kAnywhere, or 0
  // A partial part: queries also see keys of other calls. Results are then FP32 (FP64 if q is), LSE is two numbers, and the backward takes
  // LSE and D of the whole row.
  i32 partial;
  i32 adds;      // gradients are FP32 (FP64 if q is) and added to what the tensors hold
  i32 quant;     // how quantised K and V are stored: kInt8, kE4M3, kE5M2, kInt4; 0: in q's dtype
  i32 by_column; // quantised K: scales belong to columns, not to rows
  i32 seen;      // a function of the caller says which keys are visible
  i32 program;   // the two halves of a hash of the code of the caller's functions; 0 without functions
  i32 program_high;

  // Whether scores are kept in their own unit. Otherwise they are kept as q.k, and the scale is folded into exp2's argument.
  STROBE_FN constexpr bool additive() const { return bias || penalty || function || scaled; }
  // Whether the backward needs the derivative of the score by x.
  STROBE_FN constexpr bool curved() const { return function && function != kAdded; }
  // Whether the score is a function of the caller.
  STROBE_FN constexpr bool given() const { return function == kProgram || function == kAdded; }
  // Whether scores are computed element by element, beyond hiding by position.
  STROBE_FN constexpr bool by_element() const { return additive() || mask || seen; }
  // Whether any element may be hidden for other reasons than its position.
  STROBE_FN constexpr bool hides() const { return mask || bias || seen || given(); }
  // Whether scores may be as large as FP32 allows. LSE and M are then kept natural, and the backward corrects LSE's rounding.
  STROBE_FN constexpr bool unbounded() const { return bias || given(); }
  // Whether dq, dk and dv have the type of sums instead of q's.
  STROBE_FN constexpr bool unrounded_gradients() const { return partial || adds; }
};

// The factor from a score as it is kept (q.k, or already scaled) to its natural unit, that of exp.
template <Features F, class T> STROBE_FN constexpr T natural_factor(T scale) { return F.additive() ? T(1) : scale; }

// FP32 and FP64 sum D and dP in runs of this many columns. D and dP may cancel, so the rounding errors of longer runs would matter.
inline constexpr i32 kRunOfColumns = 32;

// Heads with more columns are called wide. Their rows take too many registers for the kernels' usual division of work.
inline constexpr i32 kMostUsualDim = 256;
STROBE_FN constexpr bool wide(i32 head_dim, i32 head_dim_v) { return max(head_dim, head_dim_v) > kMostUsualDim; }

// The values of strobe_dtype.
inline constexpr i32 kF32 = 1, kF16 = 2, kBF16 = 3, kF64 = 4, kInt8 = 8, kE4M3 = 9, kInt4 = 10, kE5M2 = 11;
STROBE_FN constexpr i32 element_bytes(i32 dtype) { return dtype == kF64 ? 8 : dtype == kF32 ? 4 : 2; }

} // namespace strobe::inline STROBE_ISA
