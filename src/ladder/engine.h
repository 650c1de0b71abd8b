// The rungs of the ladder for tensors on the CPU: the papers' algorithms in plain C++. They have the names of the GPU's rungs
// (cuda/families/ladder.h).
#pragma once
#include "../engine.h"

namespace strobe {
std::vector<const Engine *> cpu_ladder_engines();
}
