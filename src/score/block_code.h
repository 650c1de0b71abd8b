// A mask function as the programs that kernels/passes/mask_blocks.h interprets to find bounds of its values.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "../../kernels/attention/mask_blocks.h"
#include "score/interval.h"

namespace strobe::score {

struct BlockCode {
  // A way in which a tensor is read.
  struct Load {
    int32_t captured;
    int32_t x, y; // the axes along which the index may vary within a block; -1: none
    bool operator==(const Load &) const = default;
  };
  struct Part { // all places are in `words`
    int64_t steps = 0, out = 0, in = 0;
    int32_t count = 0, reads = 0, slots = 0;
  };

  std::vector<uint64_t> words;
  std::vector<Load> loads;
  Part side[2], pairs;
  int32_t result = 0;    // its slot in the code of pairs
  int32_t functions = 0; // bounds::bit_of_function() of those that occur
  std::string refusal;   // why no GPU evaluates this function; empty: it does

  BlockCode(const Intervals &, const Captured *);
};

} // namespace strobe::score
