// The CPU engines, one per instruction set, from the fastest to the slowest.
#pragma once
#include <vector>

#include "../engine.h"

namespace strobe {
std::vector<const Engine *> cpu_engines();
// The architecture that an engine needs, if this library was built for another one. Null for any other name.
const char *foreign_architecture(const std::string &engine);
} // namespace strobe
