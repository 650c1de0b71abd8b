// AMX's registers: eight tiles of 16 rows of 64 bytes.
#pragma once
#include "simd.h"

namespace strobe::inline STROBE_ISA {

template <int t> STROBE_INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(t)); }
template <int t> STROBE_INLINE void tile_load(const void *p, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(t), "r"(p), "r"(stride) : "memory");
}
template <int t> STROBE_INLINE void tile_store(void *p, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(t), "r"(p), "r"(stride) : "memory");
}
// c (16 x 16 FP32) += a (16 x 32 bf16) b (16 pairs of rows x 16).
template <int c, int a, int b> STROBE_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

// Configures the thread's tile registers during its lifetime.
struct TileSession {
  STROBE_INLINE TileSession() {
    alignas(64) struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t columns[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.columns[t] = 64;
      config.rows[t] = 16;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  STROBE_INLINE ~TileSession() { asm volatile("tilerelease"); }
};

} // namespace strobe::inline STROBE_ISA
