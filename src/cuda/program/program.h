// The steps of a CUDA engine for a problem, in order. A step has all that is needed to compile it, to print it or, with addresses, to
// launch it.
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "attention/text.h"
#include "cuda/compile/jit.h"
#include "cuda/program/addresses.h"
#include "cuda/program/tensor_maps.h"

namespace strobe::cuda {

struct Launch {
  static constexpr size_t kMostArguments = 4096; // bytes of a kernel's arguments

  const KernelSource *source;
  std::vector<int32_t> config; // the integers of the kernel's Config
  int64_t grid;                // CTAs, on one axis
  int32_t threads;
  int32_t shared_bytes;               // dynamic shared memory
  std::vector<std::byte> arguments;   // with marks in place of addresses
  std::vector<uint16_t> marks;        // where the marks lie
  std::vector<uint16_t> map_requests; // offsets of the TensorMaps that must be encoded
  bool calls_functions = false;       // the kernel calls the caller's functions
  bool finishes = false;              // the next launch begins after its end, because it reads what this one writes without waiting
  bool of_captured = false;           // these functions are those for the gradients of captured tensors
  Functions functions{};              // the source of these functions, set when the program is complete

  template <class Config, class Arguments>
  Launch(const KernelSource &source, const Config &config, int64_t grid, int32_t threads, int32_t shared_bytes, const Arguments &arguments)
      : source(&source), config(sizeof(Config) / sizeof(int32_t)), grid(grid), threads(threads), shared_bytes(shared_bytes),
        arguments(sizeof(Arguments)) {
    static_assert(std::has_unique_object_representations_v<Config> && sizeof(Config) % sizeof(int32_t) == 0, "int32 fields only");
    static_assert(sizeof(Arguments) <= kMostArguments);
    std::memcpy(this->config.data(), &config, sizeof config);
    std::memcpy(this->arguments.data(), &arguments, sizeof arguments);
    Marks found{*this, reinterpret_cast<const std::byte *>(&arguments)};
    each_pointer(arguments, found);
    if constexpr (requires { config.features.program; }) calls_functions = config.features.program != 0;
  }

  // Writes the arguments of one run.
  void bind(const Addresses &, std::byte *arguments) const;

private:
  struct Marks { // offsets in the arguments, found by each_pointer
    Launch &launch;
    const std::byte *begin;

    uint16_t offset(const void *member) const { return static_cast<uint16_t>(static_cast<const std::byte *>(member) - begin); }
    template <class T> void operator()(T *const &pointer) {
      if (!pointer) return;
      if (!is_mark(pointer)) throw Error(STROBE_INTERNAL, text("an argument of ", launch.source->entry, " has an address that is no mark"));
      launch.marks.push_back(offset(&pointer));
    }
    void operator()(const TensorMap &map) {
      if (is_request(map)) launch.map_requests.push_back(offset(&map));
    }
  };
};

// A step that sets bytes of the workspace to zero.
struct Zero {
  void *begin; // a mark
  uint64_t bytes;
};

using Step = std::variant<Launch, Zero>;

struct Program {
  std::vector<Step> steps;
  std::shared_ptr<const Problem> copied; // the call with marks, if the first step copies lists; null: no list is copied
  bool overlap = false;                  // thread blocks of a launch may begin as soon as those of the previous one have all begun
  bool persistent = false;               // the main kernel's grid is no larger than the GPU: it has at most one block per SM
  std::string kernel;                    // a description, for explain()
  int64_t tile_q = 0, tile_k = 0;
  double predicted_seconds = 0;
  std::vector<std::string> notes;
};

} // namespace strobe::cuda
