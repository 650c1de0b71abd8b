// A libnvrtc for the emulator: the real one (STROBE_EMULATOR_NVRTC is its path), but every program is compiled to PTX alone, which it hands out
// where the cubin would be. ptxas never runs, so the log says nothing of registers.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace {

void *real() {
  static void *const library = [] {
    const char *path = std::getenv("STROBE_EMULATOR_NVRTC");
    std::error_code ignored;
    if (path) // NVRTC looks for its builtins by name alone
      for (const auto &file : std::filesystem::directory_iterator(std::filesystem::path(path).parent_path(), ignored))
        if (file.path().filename().string().starts_with("libnvrtc-builtins.so.")) dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
    void *opened = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!opened) std::fprintf(stderr, "STROBE_EMULATOR_NVRTC must be the path of a libnvrtc.so: %s\n", path ? dlerror() : "it is not set");
    return opened;
  }();
  return library;
}

// Result 7 is NVRTC's internal error.
template <class... Arguments> int forward(const char *name, Arguments... arguments) {
  void *function = real() ? dlsym(real(), name) : nullptr;
  return function ? reinterpret_cast<int (*)(Arguments...)>(function)(arguments...) : 7;
}

} // namespace

extern "C" {

int nvrtcVersion(int *major, int *minor) { return forward("nvrtcVersion", major, minor); }
int nvrtcGetNumSupportedArchs(int *count) { return forward("nvrtcGetNumSupportedArchs", count); }
int nvrtcGetSupportedArchs(int *archs) { return forward("nvrtcGetSupportedArchs", archs); }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
  return forward("nvrtcCreateProgram", program, source, name, headers, texts, names);
}
int nvrtcCompileProgram(void *program, int count, const char *const *options) {
  constexpr std::string_view kReal = "--gpu-architecture=sm_", kVirtual = "--gpu-architecture=compute_", kPtxas = "--ptxas-options";
  std::vector<std::string> changed;
  for (std::string_view option : std::vector<std::string_view>(options, options + count))
    if (option.starts_with(kReal))
      changed.push_back(std::string(kVirtual) + std::string(option.substr(kReal.size())));
    else if (!option.starts_with(kPtxas))
      changed.emplace_back(option);
  std::vector<const char *> pointers;
  for (const std::string &option : changed) pointers.push_back(option.c_str());
  return forward("nvrtcCompileProgram", program, static_cast<int>(pointers.size()), pointers.data());
}
int nvrtcGetCUBINSize(void *program, size_t *size) { return forward("nvrtcGetPTXSize", program, size); }
int nvrtcGetCUBIN(void *program, char *code) { return forward("nvrtcGetPTX", program, code); }
int nvrtcGetProgramLogSize(void *program, size_t *size) { return forward("nvrtcGetProgramLogSize", program, size); }
int nvrtcGetProgramLog(void *program, char *log) { return forward("nvrtcGetProgramLog", program, log); }
int nvrtcDestroyProgram(void **program) { return forward("nvrtcDestroyProgram", program); }
const char *nvrtcGetErrorString(int result) {
  void *function = real() ? dlsym(real(), "nvrtcGetErrorString") : nullptr;
  return function ? reinterpret_cast<const char *(*)(int)>(function)(result) : "no NVRTC";
}
}
