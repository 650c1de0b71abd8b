// What the tests of src/cuda need around them: environment variables, folders, forked processes, fake libraries.
#pragma once
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>

#include "cuda/compile/jit.h"
#include "fake_cuda.h"

namespace strobe::cuda::test {

namespace fs = std::filesystem;

inline const KernelSource kPlain{"test/plain.h", "test::Plain", "test::Config"};
struct Config {
  int32_t add, times;
};
inline KernelKey<Config> plain(int add) { return {&kPlain, {add, 2}}; }

class Variable { // sets an environment variable until the end of the scope; null: unsets it
public:
  Variable(const char *name, const char *value) : name_(name), had_(std::getenv(name) != nullptr), old_(had_ ? std::getenv(name) : "") {
    set(value);
  }
  Variable(const char *name, const std::string &value) : Variable(name, value.c_str()) {}
  ~Variable() { set(had_ ? old_.c_str() : nullptr); }
  Variable(const Variable &) = delete;

private:
  void set(const char *value) { value ? setenv(name_, value, 1) : unsetenv(name_); }
  const char *name_;
  bool had_;
  std::string old_;
};

class Folder { // a temporary folder that exists until the end of the scope
public:
  Folder() {
    char name[] = "/tmp/strobe-test-XXXXXX";
    REQUIRE(mkdtemp(name));
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder &) = delete;
  std::string operator/(const std::string &name) const { return path_ + "/" + name; }
  const std::string &path() const { return path_; }

private:
  std::string path_;
};

inline std::string contents(const std::string &path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void write(const std::string &path, const std::string &text) { std::ofstream(path, std::ios::binary) << text; }

inline std::string nvrtc_file(int major) {
  const std::string m = std::to_string(major);
  return BINARY_FOLDER "/nvrtc" + m + "/libnvrtc.so." + m;
}

// An empty cache, and the fake NVRTC 13, which counts its compilations.
struct Compiling {
  Folder folder;
  Variable cache{"STROBE_CACHE_DIR", folder / "cache"}, log{"FAKE_NVRTC_LOG", folder / "log"}, nvrtc{"STROBE_NVRTC", nvrtc_file(13)};
  Variable further{"STROBE_CACHE_PATH", nullptr}, readonly{"STROBE_CACHE_READONLY", nullptr}, offline{"STROBE_OFFLINE", nullptr};

  int compiled() const { // the number of compilations so far, in all processes
    const std::string lines = contents(folder / "log");
    return static_cast<int>(std::ranges::count(lines, '\n'));
  }
  std::vector<std::string> files() const { // the files in the cache
    std::vector<std::string> all;
    if (fs::exists(folder / "cache"))
      for (const auto &file : fs::recursive_directory_iterator(folder / "cache"))
        if (file.is_regular_file()) all.push_back(file.path().string());
    return all;
  }
};

// The answer of a forked child. The child gets a minute, because it would wait for ever for a lock that its parent holds.
inline std::string in_child(const std::function<std::string()> &answer) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    std::string text;
    try {
      text = answer();
    } catch (const std::exception &e) {
      text = e.what();
    }
    if (::write(ends[1], text.data(), text.size()) < 0) _exit(1);
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  return text;
}

// The text of the exception that f throws; empty if it throws none.
template <class F> std::string thrown(strobe_status status, F f) {
  try {
    f();
  } catch (const Error &e) {
    CHECK(e.status == status);
    return e.what();
  }
  return {};
}
inline bool has(const std::string &text, const std::string &part) { return text.find(part) != text.npos; }

// The fake driver. It is loaded first, so that the tests use no other driver, whatever the machine has.
inline FakeCuda &fake_cuda() {
  static FakeCuda *const fake = [] {
    void *library = dlopen(BINARY_FOLDER "/driver/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(dlerror());
    return reinterpret_cast<FakeCuda *(*)()>(dlsym(library, "fake_cuda"))();
  }();
  return *fake;
}
inline const FakeCuda &kLoadedFirst = fake_cuda();

} // namespace strobe::cuda::test
