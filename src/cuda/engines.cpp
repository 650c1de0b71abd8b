#include "cuda/engine.h"
#include "cuda/ladder.h"

namespace strobe {

std::vector<const Engine *> cuda_engines() { return ladder_engines(); }

} // namespace strobe
