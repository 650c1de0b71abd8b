// The CPU engines, one an instruction set, from the fastest to the slowest.
#pragma once
#include <vector>

#include "../engine.h"

namespace strobe {
std::vector<const Engine *> cpu_engines();
}
