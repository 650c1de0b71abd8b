// A fake libnvrtc.so. It "compiles" slowly, to a text of its inputs, and each time adds a line to the file that FAKE_NVRTC_LOG names. With
// FAKE_NVRTC_MEET, no call succeeds before this many calls have begun.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

struct Program {
  std::string source, cubin, log;
};

static const std::vector<int> archs = MAJOR == 12 ? std::vector{50, 61, 70, 75, 80, 90, 120} : std::vector{75, 80, 90, 120};

static bool meets(int others) {
  static std::atomic<int> come = 0;
  come++;
  for (int i = 0; i < 5000 && come < others; i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return come >= others;
}

extern "C" {

int nvrtcVersion(int *major, int *minor) { return *major = MAJOR, *minor = MAJOR == 12 ? 9 : 7, 0; }
int nvrtcGetNumSupportedArchs(int *count) { return *count = static_cast<int>(archs.size()), 0; }
int nvrtcGetSupportedArchs(int *all) { return std::memcpy(all, archs.data(), archs.size() * sizeof(int)), 0; }
const char *nvrtcGetErrorString(int result) { return result ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS"; }

int nvrtcCreateProgram(Program **out, const char *source, const char *, int count, const char *const *texts, const char *const *names) {
  *out = new Program{source, {}, {}};
  for (int i = 0; i < count; i++) (*out)->source += std::string("== ") + names[i] + "\n" + texts[i];
  return 0;
}
int nvrtcCompileProgram(Program *p, int count, const char *const *options) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (const char *count = std::getenv("FAKE_NVRTC_MEET"); count && !meets(std::atoi(count))) return 1;
  if (const char *path = std::getenv("FAKE_NVRTC_LOG")) {
    const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT, 0666);
    const std::string line = p->source.substr(0, p->source.find(';')).substr(p->source.find("using")) + "\n";
    if (write(fd, line.data(), line.size()) < 0) return 1;
    close(fd);
  }
  if (p->source.find("does_not_compile") != std::string::npos) return p->log = "kernel.cu(1): error: does_not_compile is undefined", 6;
  p->log = "ptxas info    : Function properties for kernel\n"
           "    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
           "ptxas info    : Used 42 registers, used 1 barriers\n";
  for (int i = 0; i < count; i++) p->cubin += std::string(options[i]) + "\n";
  p->cubin += p->source;
  return 0;
}
int nvrtcGetCUBINSize(Program *p, size_t *size) { return *size = p->cubin.size(), 0; }
int nvrtcGetCUBIN(Program *p, char *to) { return std::memcpy(to, p->cubin.data(), p->cubin.size()), 0; }
int nvrtcGetProgramLogSize(Program *p, size_t *size) { return *size = p->log.size() + 1, 0; }
int nvrtcGetProgramLog(Program *p, char *to) { return std::memcpy(to, p->log.c_str(), p->log.size() + 1), 0; }
int nvrtcDestroyProgram(Program **p) { return delete *p, *p = nullptr, 0; }
}
