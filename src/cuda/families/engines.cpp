#include "cuda/families/families.h"
#include "cuda/families/ladder.h"

namespace strobe {

// From the fastest family to the slowest. The rungs of the ladder run only by name.
std::vector<const Engine *> cuda_engines() {
  std::vector<const Engine *> all{&cuda::sm90_engine(), &cuda::mma_engine(), &cuda::tf32_engine(), &cuda::simt_engine()};
  for (const Engine *rung : ladder_engines()) all.push_back(rung);
  return all;
}

} // namespace strobe
