// The state of a running program: the warps of the resident blocks.
#pragma once
#include <array>

#include "program.h"

namespace strobe::emulator {

// Those lanes of a warp that are at the same instruction.
struct Path {
  uint32_t pc, lanes;
  bool stalled = false; // waits at an instruction for lanes of other paths
};

struct RunningWarp : Warp {
  uint32_t alive;
  std::vector<Path> paths;
  size_t at = 0;        // the running path
  bool rotate = false;  // the path's time slice is over, so another path is next
  bool blocked = false; // waits at a barrier of the block
};

// One of a block's sixteen barriers. Warps arrive as a whole.
struct Barrier {
  uint32_t arrived = 0, expected = 0;
  uint32_t threads = 0, holds = 0; // how many threads have arrived, and for how many of these the predicate is true (bar.red)
  std::vector<std::pair<RunningWarp *, const Instruction *>> waiting;
};

struct RunningBlock : Block {
  std::vector<RunningWarp> warps;
  std::array<Barrier, 16> barriers;
};

} // namespace strobe::emulator
