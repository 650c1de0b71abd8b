// Writes the table of a part (attention/part.h) into the workspace. Its words are the kernel's arguments, so a launch, and a graph that has
// captured it, hold copies of them.
#pragma once
#include "../attention/part.h"
#include "config.h"

namespace strobe::passes {

template <WordsConfig C> struct WriteWords {
  using Arguments = WordArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    for (i32 i = (i32)threadIdx.x; i < a.count; i += kThreads) a.to[i] = a.words[i];
  }
};

} // namespace strobe::passes
