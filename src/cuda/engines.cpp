#include "cuda/engine.h"
#include "cuda/ladder.h"

namespace strobe {

std::vector<const Engine *> cuda_engines() {
  std::vector<const Engine *> all{&cuda::simt_engine()};
  for (const Engine *rung : ladder_engines()) all.push_back(rung);
  return all;
}

} // namespace strobe
