// The teaching kernels of kernels/ladder as engines. They run only if asked for by name.
#pragma once
#include <vector>

#include "../../engine.h"

namespace strobe {
std::vector<const Engine *> ladder_engines(); // from the lowest rung to the highest
}
