// What a pass over rows, and not over scores, is compiled for.
#pragma once
#include "../attention/base.h"

namespace strobe::passes {

struct RowsConfig {
  i32 dtype;
  i32 head_dim, tile_q; // of the BackwardConfig
  i32 aligned;

  STROBE_FN static constexpr i32 threads() { return 256; }
  STROBE_FN constexpr i64 blocks(i64 batch, i64 heads, i64 seqlen_q) const { return batch * heads * div_up(seqlen_q, tile_q); }
};

} // namespace strobe::passes
