// Division by a number that the host knows in advance, as one multiplication.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

// The quotient is exact for dividends below 2^31 (Granlund and Montgomery 1994).
struct Divisor {
  u32 by, multiplier, shift;

  // 0 < by < 2^31
  STROBE_FN static Divisor make(u32 by) {
    u32 bits = 0;
    while ((u64(1) << bits) < by) ++bits;
    return {by, (u32)(((u64(1) << (31 + bits)) + by - 1) / by), bits};
  }
  STROBE_FN u32 divide(u32 x) const { return by == 1 ? x : (u32)((u64)x * multiplier >> 32) >> (shift - 1); }
};

} // namespace strobe::inline STROBE_ISA
