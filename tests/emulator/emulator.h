// Runs PTX, as NVRTC writes it for Strobe's kernels, on the CPU: one warp at a time, for small problems. Device memory is host memory.
//
// Unknown or illegal instructions throw a Fault that names the kernel, the PTX line, the block and the warp.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace strobe::emulator {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Module;
std::shared_ptr<const Module> parse(const std::string &ptx); // throws a Fault with the line

struct Parameter {
  uint32_t offset, bytes;
};
struct KernelInfo {
  uint32_t static_shared, argument_bytes;
  std::vector<Parameter> parameters;
};
KernelInfo kernel_info(const Module &, const std::string &kernel); // throws a Fault if the name is unknown

struct Launch {
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  size_t dynamic_shared = 0;
  const void *arguments = nullptr;
};
struct Machine {
  uint32_t multiprocessors = 4, blocks_per_multiprocessor = 2; // resident at a time; other blocks begin, in order, as these end
  bool late = false;     // asynchronous copies and products happen as late as the program's waits permit, instead of at once
  bool few_bits = false; // sums of FP8 products are truncated as Hopper's are
  bool races = false;    // searches for races in shared memory; finds most of them if late is set too
  uint32_t seed = 0;     // 0: warps run in the order of their numbers; else the seed of another order
};
// Runs the kernel. Returns when every block has ended.
void run(const Module &, const std::string &kernel, const Launch &, const Machine &);

} // namespace strobe::emulator
