// The files of kernels/, as they lie in the library.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace strobe::cuda {

struct Header {
  const char *name; // below kernels/: "attention/base.h"
  std::string_view text;
};

// All of them; the build writes this function's file (embed.cmake).
std::span<const Header> kernel_headers();

// One header as NVRTC takes it: it resolves no include relative to the including file, so each names the file below kernels/.
struct Included {
  std::string name, text;
};
// The header and all that it includes, directly or not, each once.
std::vector<Included> included_by(std::string_view header);

} // namespace strobe::cuda
