// The rungs of the ladder for tensors on the CPU, by the names of those for a GPU (cuda/families/ladder.h): the papers' algorithms in
// plain C++.
#pragma once
#include "../engine.h"

namespace strobe {
std::vector<const Engine *> cpu_ladder_engines();
}
