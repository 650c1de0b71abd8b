// Lists of integers that have gaps in the caller's memory (cu_seqlens_q = table[:, 0]). The host describes them, and a pass copies them
// into the workspace before kernels read them.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

struct ListCopy {
  const void *from;
  void *to;
  i64 stride[3]; // in integers, of any sign
  u32 size[3];   // fewer than 2^31 integers in all; leading sizes are 1 if the list has fewer axes
  i32 wide;      // 1: int64; 0: int32
};

enum : i32 { kMostLists = 9 };
struct ListArguments {
  ListCopy lists[kMostLists];
  i32 count, unused;
};

} // namespace strobe::inline STROBE_ISA
