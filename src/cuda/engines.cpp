#include "cuda/engine.h"

namespace strobe {

std::vector<const Engine *> cuda_engines() { return {&cuda::simt_engine()}; }

} // namespace strobe
