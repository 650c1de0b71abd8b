// NVRTC, NVIDIA's run-time compiler, found and loaded at run time.
#pragma once
#include <string>
#include <vector>

#include "cuda/compile/headers.h"

namespace strobe::cuda {

struct Nvrtc {
  using Program = struct _nvrtcProgram *;
  template <class... Arguments> using Call = int (*)(Arguments...);

  Call<int *, int *> nvrtcVersion;
  Call<int *> nvrtcGetNumSupportedArchs, nvrtcGetSupportedArchs;
  Call<Program *, const char *, const char *, int, const char *const *, const char *const *> nvrtcCreateProgram;
  Call<Program, int, const char *const *> nvrtcCompileProgram;
  Call<Program, size_t *> nvrtcGetCUBINSize, nvrtcGetProgramLogSize;
  Call<Program, char *> nvrtcGetCUBIN, nvrtcGetProgramLog;
  Call<Program *> nvrtcDestroyProgram;
  const char *(*nvrtcGetErrorString)(int);

  int major = 0, minor = 0;
  std::vector<int> archs; // compute capabilities, ascending
  std::string path;

  std::string version() const { return std::to_string(major) + "." + std::to_string(minor); }
};

// An NVRTC that compiles for this compute capability and whose code the driver, if there is one, accepts; null if there is none. If
// STROBE_NVRTC is set (libraries or folders, separated by colons), only these are tried. Otherwise: the wheels beside the libraries of this
// process, CUDA_HOME and CUDA_PATH, /usr/local/cuda, the loader's path. NVRTC 13 comes before 12, except for GPUs that only 12 supports
// (before 7.5).
const Nvrtc *nvrtc(int cc);
// What was searched for and where, and what was wrong with the libraries found.
std::string nvrtc_missing(int cc);
// The compute capabilities for which nvrtc() finds an NVRTC, ascending.
std::vector<int> nvrtc_archs();
// Whether the driver loads cubins of this major version of NVRTC. False if the driver's major version is lower.
bool driver_follows(int nvrtc_major);

struct Translation {
  std::string name; // for messages
  std::string text;
  std::vector<Included> headers;
  std::vector<std::string> options;
};
struct Compiled {
  std::string cubin, log;
};
// Compiles. If the source does not compile, throws with the whole log.
Compiled compile(const Nvrtc &, const Translation &);

} // namespace strobe::cuda
