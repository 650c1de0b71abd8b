// The running program: the warps of the resident blocks.
#pragma once
#include <array>

#include "program.h"

namespace strobe::emulator {

// Lanes of a warp at the same instruction.
struct Path {
  uint32_t pc, lanes;
  bool stalled = false; // at an instruction that waits for lanes of other paths
};

struct RunningWarp : Warp {
  uint32_t alive;
  std::vector<Path> paths;
  size_t at = 0;        // the running path
  bool rotate = false;  // its time slice is over: another path is next
  bool blocked = false; // at a barrier of the block
};

// One of a block's sixteen barriers. Whole warps arrive.
struct Barrier {
  uint32_t arrived = 0, expected = 0;
  uint32_t threads = 0, holds = 0; // threads that arrived, and the number of them for which the predicate holds (bar.red)
  std::vector<std::pair<RunningWarp *, const Instruction *>> waiting;
};

struct RunningBlock : Block {
  std::vector<RunningWarp> warps;
  std::array<Barrier, 16> barriers;
};

} // namespace strobe::emulator
