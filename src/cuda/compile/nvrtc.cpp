#include "cuda/compile/nvrtc.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "attention/text.h"
#include "cuda/driver/driver.h"
#include "cuda/driver/environment.h"
#include "cuda/driver/fork.h"

namespace strobe::cuda {
namespace fs = std::filesystem;
namespace {

// An NVRTC library that was tried. It stays loaded.
struct LoadedNvrtc {
  Nvrtc nvrtc{};
  std::string failure;

  explicit LoadedNvrtc(const std::string &path) {
    nvrtc.path = path;
    load_builtins(path);
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      failure = dlerror();
      return;
    }
    auto find = [&](auto &function, const char *name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function && failure.empty()) failure = text(path, " has no ", name);
    };
    Nvrtc &n = nvrtc;
    find(n.nvrtcVersion, "nvrtcVersion");
    find(n.nvrtcGetNumSupportedArchs, "nvrtcGetNumSupportedArchs");
    find(n.nvrtcGetSupportedArchs, "nvrtcGetSupportedArchs");
    find(n.nvrtcCreateProgram, "nvrtcCreateProgram");
    find(n.nvrtcCompileProgram, "nvrtcCompileProgram");
    find(n.nvrtcGetCUBINSize, "nvrtcGetCUBINSize");
    find(n.nvrtcGetCUBIN, "nvrtcGetCUBIN");
    find(n.nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize");
    find(n.nvrtcGetProgramLog, "nvrtcGetProgramLog");
    find(n.nvrtcDestroyProgram, "nvrtcDestroyProgram");
    find(n.nvrtcGetErrorString, "nvrtcGetErrorString");
    if (!failure.empty()) return;
    int count = 0;
    if (n.nvrtcVersion(&n.major, &n.minor) || n.nvrtcGetNumSupportedArchs(&count)) failure = text(path, " does not answer");
    n.archs.resize(count);
    if (count && n.nvrtcGetSupportedArchs(n.archs.data())) n.archs.clear();
    std::ranges::sort(n.archs);
    if (n.archs.empty() && failure.empty()) failure = text(path, " names no architecture");
  }

  // NVRTC looks for its builtins library by name only, and the loader does not search the folder of that library.
  static void load_builtins(const std::string &path) {
    std::error_code ignored;
    for (const auto &file : fs::directory_iterator(fs::path(path).parent_path(), ignored))
      if (file.path().filename().string().starts_with("libnvrtc-builtins.so.")) dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
  }
};

// The files of NVRTC `major` in a folder, which is laid out like a wheel, a toolkit, or site-packages.
std::vector<std::string> libraries_in(const std::string &folder, int major) {
  std::vector<std::string> found;
  for (const char *below : {"", "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "lib64", "lib"}) {
    const fs::path file = fs::path(folder) / below / text("libnvrtc.so.", major);
    std::error_code ignored;
    if (fs::exists(file, ignored)) found.push_back(file.string());
  }
  return found;
}

// The site-packages folders from which this process has loaded libraries: torch's, numpy's, Strobe's.
std::vector<std::string> site_packages() {
  std::vector<std::string> found;
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *found) {
        const std::string_view path = info->dlpi_name ? info->dlpi_name : "";
        for (std::string_view name : {"/site-packages/", "/dist-packages/"})
          if (const size_t at = path.rfind(name); at != path.npos) {
            const std::string folder(path.substr(0, at + name.size() - 1));
            auto &all = *static_cast<std::vector<std::string> *>(found);
            if (std::ranges::find(all, folder) == all.end()) all.push_back(folder);
          }
        return 0;
      },
      &found);
  return found;
}

std::vector<std::string> folders_to_search() {
  std::vector<std::string> folders = site_packages();
  for (const char *name : {"CUDA_HOME", "CUDA_PATH"})
    if (const std::string home = environment(name); !home.empty()) folders.push_back(home);
  folders.push_back("/usr/local/cuda");
  return folders;
}

// Libraries to try, in order.
std::vector<std::string> candidates(int cc) {
  std::vector<std::string> all;
  const std::vector<std::string> named = environment_list("STROBE_NVRTC");
  const std::vector<std::string> folders = named.empty() ? folders_to_search() : named;
  for (int major : cc < 75 ? std::array{12, 13} : std::array{13, 12}) {
    for (const std::string &folder : folders)
      for (std::string &file : libraries_in(folder, major)) all.push_back(std::move(file));
    if (named.empty()) all.push_back(text("libnvrtc.so.", major));
  }
  std::error_code ignored;
  for (const std::string &file : named)
    if (!fs::is_directory(file, ignored)) all.push_back(file);
  return all;
}

const LoadedNvrtc &load(const std::string &path) {
  static auto &mutex = *new std::mutex;
  static auto &loaded = *new std::map<std::string, std::unique_ptr<const LoadedNvrtc>>;
  const ForkGate gate;
  const std::lock_guard lock(mutex);
  auto &one = loaded[path];
  if (!one) one = std::make_unique<const LoadedNvrtc>(path);
  return *one;
}

struct Search {
  const Nvrtc *found = nullptr;
  std::string failures; // what was wrong with earlier candidates
};

Search search(int cc) {
  Search result;
  for (const std::string &path : candidates(cc)) {
    const LoadedNvrtc &one = load(path);
    const Nvrtc &n = one.nvrtc;
    std::string failure = one.failure;
    if (failure.empty() && !std::ranges::binary_search(n.archs, cc))
      failure = text(path, " is NVRTC ", n.version(), ", for sm_", n.archs.front(), " to sm_", n.archs.back());
    if (failure.empty() && !driver_follows(n.major))
      failure = text(path, " is NVRTC ", n.version(), ", newer than the driver (CUDA ", driver()->version / 1000, ")");
    if (failure.empty()) {
      result.found = &n;
      return result;
    }
    result.failures += "\n  " + failure;
  }
  return result;
}

} // namespace

bool driver_follows(int major) { return !driver() || driver()->version / 1000 >= major; }

const Nvrtc *nvrtc(int cc) { return search(cc).found; }

std::string nvrtc_missing(int cc) {
  const Search result = search(cc);
  if (result.found) return {};
  std::string where;
  if (const std::string named = environment("STROBE_NVRTC"); !named.empty()) {
    where = "STROBE_NVRTC=" + named;
  } else {
    for (const std::string &folder : folders_to_search()) where += folder + ", ";
    where += "the loader's path";
  }
  const bool old = cc < 75 || !driver_follows(13); // NVRTC 13 lacks this GPU, or the driver refuses its code
  return text("no NVRTC that compiles for sm_", cc, " (looked in ", where, "); accepted is NVRTC ",
              old ? "12: pip install \"nvidia-cuda-nvrtc-cu12==12.9.*" : "12 or 13: pip install \"nvidia-cuda-nvrtc",
              "\", or name the library in STROBE_NVRTC", result.failures.empty() ? "" : "; tried:", result.failures);
}

std::vector<int> nvrtc_archs() {
  std::vector<int> all;
  for (const std::string &path : candidates(90)) { // every compute capability has the same candidates, in another order
    const LoadedNvrtc &one = load(path);
    if (one.failure.empty() && driver_follows(one.nvrtc.major)) all.insert(all.end(), one.nvrtc.archs.begin(), one.nvrtc.archs.end());
  }
  std::ranges::sort(all);
  const auto twice = std::ranges::unique(all);
  all.erase(twice.begin(), twice.end());
  return all;
}

Compiled compile(const Nvrtc &n, const Translation &program) {
  const ForkGate gate;
  std::vector<const char *> names, texts, options;
  for (const Included &header : program.headers) names.push_back(header.name.c_str()), texts.push_back(header.text.c_str());
  for (const std::string &option : program.options) options.push_back(option.c_str());
  // From 12.9 on NVRTC has a cache of its own, for which it calls the driver. Strobe's cache is enough.
  if (n.major > 12 || (n.major == 12 && n.minor >= 9)) options.push_back("--no-cache");
  // Without this option NVRTC raises the stack limit of the whole process while it compiles. If several threads compile, one of them may
  // restore the limit too early.
  options.push_back("--modify-stack-limit=false");

  Nvrtc::Program handle = nullptr;
  auto check = [&](int result, const char *what, const std::string &log = {}) {
    if (result)
      throw Error(STROBE_DEVICE_ERROR, text(program.name, ": ", what, " of NVRTC ", n.version(), " (", n.path,
                                            "): ", n.nvrtcGetErrorString(result), log.empty() ? "" : "\n", log));
  };
  check(n.nvrtcCreateProgram(&handle, program.text.c_str(), "kernel.cu", static_cast<int>(names.size()), texts.data(), names.data()),
        "nvrtcCreateProgram");
  auto destroy = [&](Nvrtc::Program *p) { n.nvrtcDestroyProgram(p); };
  const std::unique_ptr<Nvrtc::Program, decltype(destroy)> owner(&handle, destroy);

  const int result = n.nvrtcCompileProgram(handle, static_cast<int>(options.size()), options.data());
  Compiled compiled;
  size_t size = 0;
  check(n.nvrtcGetProgramLogSize(handle, &size), "nvrtcGetProgramLogSize");
  compiled.log.resize(size);
  if (size) check(n.nvrtcGetProgramLog(handle, compiled.log.data()), "nvrtcGetProgramLog");
  while (!compiled.log.empty() && (!compiled.log.back() || compiled.log.back() == '\n')) compiled.log.pop_back();
  check(result, "nvrtcCompileProgram", compiled.log);
  check(n.nvrtcGetCUBINSize(handle, &size), "nvrtcGetCUBINSize");
  compiled.cubin.resize(size);
  check(n.nvrtcGetCUBIN(handle, compiled.cubin.data()), "nvrtcGetCUBIN");
  return compiled;
}

} // namespace strobe::cuda
