// What a CUDA engine does for a problem: the steps, in order, each enough to compile, to print or to launch.
#pragma once
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "cuda/compile/jit.h"

namespace strobe::cuda {

struct Launch {
  const KernelSource *source;
  std::vector<int32_t> config; // the ints of the kernel's Config
  int64_t grid;                // CTAs, on one axis
  int32_t threads;
  int32_t shared_bytes; // dynamic
  std::vector<std::byte> arguments;

  template <class Config, class Arguments>
  Launch(const KernelSource &source, const Config &config, int64_t grid, int32_t threads, int32_t shared_bytes, const Arguments &arguments)
      : source(&source), config(sizeof(Config) / sizeof(int32_t)), grid(grid), threads(threads), shared_bytes(shared_bytes),
        arguments(sizeof(Arguments)) {
    static_assert(std::has_unique_object_representations_v<Config> && sizeof(Config) % sizeof(int32_t) == 0, "int32 fields only");
    std::memcpy(this->config.data(), &config, sizeof config);
    std::memcpy(this->arguments.data(), &arguments, sizeof arguments);
  }
};

// Bytes of the workspace set to zero.
struct Zero {
  void *begin;
  uint64_t bytes;
};

using Step = std::variant<Launch, Zero>;

struct Program {
  std::vector<Step> steps;
  bool overlap = false; // thread blocks of a launch may come as soon as those of the one before have all begun
  std::string kernel;   // in words, for explain()
  int64_t tile_q = 0, tile_k = 0;
  double predicted_seconds = 0;
  std::vector<std::string> notes;
};

// The workspace while a program is made: null for one that is only asked its size. 256-byte aligned pieces.
class Scratch {
public:
  Scratch() = default; // of what is only planned: counts
  explicit Scratch(void *base) : base_(static_cast<std::byte *>(base)), planned_(false) {}
  bool planned() const { return planned_; }
  template <class T> T *take(int64_t count) {
    T *piece = reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(base_) + bytes_);
    bytes_ += (uint64_t(count) * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
  uint64_t bytes() const { return bytes_; }

private:
  std::byte *base_ = nullptr;
  uint64_t bytes_ = 0;
  bool planned_ = true;
};

} // namespace strobe::cuda
