// What runs: the warps of the blocks that are resident.
#pragma once
#include <array>

#include "program.h"

namespace strobe::emulator {

// Lanes of a warp that are at the same instruction.
struct Path {
  uint32_t pc, lanes;
  bool stalled = false; // at an instruction that waits for lanes of other paths
};

struct RunningWarp : Warp {
  uint32_t alive;
  std::vector<Path> paths;
  size_t at = 0;        // the path that runs
  bool rotate = false;  // it has had its time: another is next
  bool blocked = false; // at a barrier of the block
};

// One of the sixteen of a block. Whole warps come.
struct Barrier {
  uint32_t arrived = 0, expected = 0;
  uint32_t threads = 0, holds = 0; // those that came, and of them those for which the predicate holds (bar.red)
  std::vector<std::pair<RunningWarp *, const Instruction *>> waiting;
};

struct RunningBlock : Block {
  std::vector<RunningWarp> warps;
  std::array<Barrier, 16> barriers;
};

} // namespace strobe::emulator
