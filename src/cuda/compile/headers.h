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

// All files of kernels/. The build generates this function (embed.cmake).
std::span<const Header> kernel_headers();

// A header in the form for NVRTC. NVRTC resolves no include relative to the including file, so each include names a file below kernels/.
struct Included {
  std::string name, text;
};
// The header and everything that it includes, directly or indirectly, each file once.
std::vector<Included> included_by(std::string_view header);

} // namespace strobe::cuda
