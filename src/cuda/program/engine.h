// What the CUDA engines share.
#pragma once
#include <variant>

#include "cuda/driver/device.h"
#include "cuda/program/program.h"
#include "../../engine.h"

namespace strobe::cuda {

struct TunedTile;

// A family of kernels: it answers with a program or with the reason against it.
class CudaEngine : public Engine {
public:
  int32_t device_type() const override { return STROBE_CUDA; }
  std::string missing() const override;
  Answer plan(const Problem &, const Execution &, Direction) const override;
  Workspace allocate(const Problem &, const Execution &, uint64_t bytes) const override; // from the stream's memory pool
  void run(const Problem &, const Execution &, Direction, const Plan &, void *workspace) const override;
  // What would run, or the reason against it; the device may be one that is only described.
  using Made = std::variant<Program, std::string>;
  Made program_for(const Problem &, Direction, const Device &, Scratch &) const;

protected:
  // scratch may have no memory behind it: then the program's pointers mean nothing, but its kernels, grids and scratch.bytes() do.
  virtual Made program(const Problem &, Direction, const Device &, Scratch &) const = 0;

private:
  // The tile to wish for in the caller's place; null: none.
  const TunedTile *tuned(const Problem &, Direction, const Device &) const;
};

} // namespace strobe::cuda
