// The files of kernels/, embedded in the library.
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

// All files of kernels/; the build generates the file of this function (embed.cmake).
std::span<const Header> kernel_headers();

// One header in the form for NVRTC, which resolves no include relative to the including file: each include names a file below kernels/.
struct Included {
  std::string name, text;
};
// The header and all that it includes, directly or indirectly, each once.
std::vector<Included> included_by(std::string_view header);

} // namespace strobe::cuda
