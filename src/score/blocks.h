// strobe_mask_blocks: which blocks a mask function hides, sees in part, or sees as a whole.
#pragma once
#include <memory>

#include "attention/attention.h"
#include "score/interval.h"
#include "score/program.h"
#include "strobe/strobe.h"

namespace strobe::score {

constexpr int64_t kMostKeptBlocks = INT32_MAX;
[[noreturn]] void refuse_many_kept();

struct BlockGrid {
  int64_t seqlen_q, seqlen_k, block_q, block_k;
  int64_t rows() const { return (seqlen_q + block_q - 1) / block_q; }
  int64_t columns() const { return (seqlen_k + block_k - 1) / block_k; }
};

// A call after validation.
struct MaskProblem {
  strobe_block_mask mask;
  strobe_kept_blocks to; // with what is written
  std::shared_ptr<const Program> program;
  Captured captured[STROBE_MOST_CAPTURED];
  BlockGrid grid;
  int64_t offset;

  MaskProblem(const strobe_block_mask *, const strobe_kept_blocks *);
  void set_matrices(const Intervals &); // to.batch and to.heads
  void write(strobe_kept_blocks *) const;
};

void mask_blocks(MaskProblem &); // on the CPU

} // namespace strobe::score
