// A libnvrtc for the emulator. It is the real one (STROBE_EMULATOR_NVRTC is its path), but compiles every program only to PTX, and returns
// PTX in place of the cubin. ptxas never runs, so the log says nothing about registers. Programs are compiled with fewer optimisations,
// which saves a third of the time. Programs with WGMMA are not: an additional register between two products would be read before its
// product is complete. With STROBE_EMULATOR_OPTIMISED=1, all programs are compiled as they ship; so they are if NVRTC does not know the
// option.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

void *open(const char *path) {
  if (!path) return std::fputs("STROBE_EMULATOR_NVRTC is not set; accepted is the path of a libnvrtc.so\n", stderr), nullptr;
  std::error_code ignored;
  // NVRTC looks for its builtins library by name only.
  for (const auto &file : std::filesystem::directory_iterator(std::filesystem::path(path).parent_path(), ignored))
    if (file.path().filename().string().starts_with("libnvrtc-builtins.so.")) dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) std::fprintf(stderr, "STROBE_EMULATOR_NVRTC: %s; accepted is the path of a libnvrtc.so\n", dlerror());
  return library;
}
void *real() {
  static void *const library = open(std::getenv("STROBE_EMULATOR_NVRTC"));
  return library;
}

std::mutex of_wgmma_mutex;
std::set<void *> of_wgmma; // programs with WGMMA

bool is_optimised(void *program) {
  if (const char *all = std::getenv("STROBE_EMULATOR_OPTIMISED"); all && *all == '1') return true;
  const std::lock_guard lock(of_wgmma_mutex);
  return of_wgmma.contains(program);
}

constexpr int kInvalidOption = 5; // NVRTC_ERROR_INVALID_OPTION
// The result 7 is an internal error of NVRTC.
template <class... Arguments> int forward(const char *name, Arguments... arguments) {
  void *function = real() ? dlsym(real(), name) : nullptr;
  return function ? reinterpret_cast<int (*)(Arguments...)>(function)(arguments...) : 7;
}

// A change of a header: the header's name, a line that says what is wrong, and runs of lines to remove (-), each followed by its
// replacement (+).
struct Edit {
  std::string header;
  std::vector<std::pair<std::string, std::string>> changes;

  explicit Edit(const char *path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, header);
    std::getline(file, line);
    for (char before = 0; std::getline(file, line); before = line[0]) {
      if (line[0] == '-' && before != '-') changes.emplace_back();
      (line[0] == '-' ? changes.back().first : changes.back().second) += line.substr(1) + "\n";
    }
  }
  bool apply(std::string &text) const {
    for (const auto &[old, replacement] : changes) {
      const size_t at = text.find(old);
      if (at == text.npos || text.find(old, at + 1) != text.npos)
        return std::fprintf(stderr, "STROBE_EMULATOR_EDIT: kernels/%s has not once:\n%s", header.c_str(), old.c_str()), false;
      text.replace(at, old.size(), replacement);
    }
    return !changes.empty();
  }
};

} // namespace

extern "C" {

int nvrtcVersion(int *major, int *minor) { return forward("nvrtcVersion", major, minor); }
int nvrtcGetNumSupportedArchs(int *count) { return forward("nvrtcGetNumSupportedArchs", count); }
int nvrtcGetSupportedArchs(int *archs) { return forward("nvrtcGetSupportedArchs", archs); }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
  std::vector<const char *> changed(texts, texts + headers);
  std::string text;
  if (const char *path = std::getenv("STROBE_EMULATOR_EDIT")) {
    const Edit edit(path);
    for (int i = 0; i < headers; i++) {
      if (names[i] != edit.header) continue;
      text = texts[i];
      if (!edit.apply(text)) return 7;
      changed[i] = text.c_str();
    }
  }
  const int result = forward("nvrtcCreateProgram", program, source, name, headers, static_cast<const char *const *>(changed.data()), names);
  if (result == 0 && std::string_view(source).find("sm90") != std::string_view::npos) {
    const std::lock_guard lock(of_wgmma_mutex);
    of_wgmma.insert(*program);
  }
  return result;
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
  const auto compile = [&] { return forward("nvrtcCompileProgram", program, static_cast<int>(pointers.size()), pointers.data()); };
  if (!is_optimised(program)) {
    pointers.push_back("--Ofast-compile=mid");
    if (const int result = compile(); result != kInvalidOption) return result;
    pointers.pop_back();
  }
  return compile();
}
int nvrtcGetCUBINSize(void *program, size_t *size) { return forward("nvrtcGetPTXSize", program, size); }
int nvrtcGetCUBIN(void *program, char *code) { return forward("nvrtcGetPTX", program, code); }
int nvrtcGetProgramLogSize(void *program, size_t *size) { return forward("nvrtcGetProgramLogSize", program, size); }
int nvrtcGetProgramLog(void *program, char *log) { return forward("nvrtcGetProgramLog", program, log); }
int nvrtcDestroyProgram(void **program) {
  const std::lock_guard lock(of_wgmma_mutex);
  of_wgmma.erase(*program);
  return forward("nvrtcDestroyProgram", program);
}
const char *nvrtcGetErrorString(int result) {
  void *function = real() ? dlsym(real(), "nvrtcGetErrorString") : nullptr;
  return function ? reinterpret_cast<const char *(*)(int)>(function)(result) : "there is no NVRTC to ask";
}
}
