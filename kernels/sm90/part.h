// The table of a part of a larger problem (attention/part.h), read by threads that have few registers.
#pragma once
#include "../attention/part.h"
#include "../ptx/math.h"

namespace strobe::sm90 {

// Range n of a sequence, as listed in the table.
__device__ __forceinline__ HeldRange range_at(const Inputs &in, i32 list, i32 n) {
  const i32 *const at = in.part->words() + (list + 3 * n);
  return {at[0], at[1], at[2]};
}
__device__ __forceinline__ HeldRange range_of_keys(const Inputs &in, i32 b, i32 n) {
  const PartTable &t = *in.part;
  return range_at(in, t.ranges_k, b * t.step_k + n);
}
__device__ __forceinline__ HeldRange range_of_queries(const Inputs &in, i32 b, i32 n) {
  const PartTable &t = *in.part;
  return range_at(in, t.ranges_q,
                  b * t.step_q + computed_here(n)); // computed_here keeps values derived from n out of registers
}
// The first token of a packed sequence, clamped as in Inputs::sequence; 0 if sequences are not packed.
__device__ __forceinline__ i32 first_held_row(const i32 *cu_seqlens, i64 total, i32 b) {
  return cu_seqlens ? min(max(cu_seqlens[b], 0), (i32)min(total, 0x7FFFFFFFll)) : 0;
}
// Those rows of a range that exist, whatever the table says.
__device__ __forceinline__ HeldRange held(HeldRange r, const i32 *cu_seqlens, i64 total, i64 seqlen, i32 b) {
  i32 rows = (i32)seqlen;
  if (cu_seqlens) {
    const i32 most = (i32)min(total, 0x7FFFFFFFll), begin = first_held_row(cu_seqlens, total, b);
    rows = min(min(max(cu_seqlens[b + 1], begin), most) - begin, rows);
  }
  r.length = max(min(r.length, rows - r.local), 0);
  return r;
}
__device__ __forceinline__ HeldRange held_range_of_keys(const Inputs &in, i32 b, i32 n) {
  return held(range_of_keys(in, b, n), in.cu_seqlens_k, in.total_k, in.seqlen_k, b);
}
__device__ __forceinline__ HeldRange held_range_of_queries(const Inputs &in, i32 b, i32 n) {
  return held(range_of_queries(in, b, n), in.cu_seqlens_q, in.total_q, in.seqlen_q, b);
}

} // namespace strobe::sm90
