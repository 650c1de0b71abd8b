#include "cuda/engine.h"

namespace strobe {

std::vector<const Engine *> cuda_engines() { return {&cuda::sm90_engine()}; }

} // namespace strobe
