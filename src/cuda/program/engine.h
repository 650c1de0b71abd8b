// The base class of the CUDA engines.
#pragma once
#include <variant>

#include "../../engine.h"
#include "cuda/driver/device.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

struct TunedTile;

// A family of kernels. It answers a problem with a program, or with the reason against it.
class CudaEngine : public Engine {
public:
  using Made = std::variant<Program, std::string>;
  int32_t device_type() const override { return STROBE_CUDA; }
  std::string missing() const override;
  Answer plan(const Problem &, const Execution &, Operation) const override;
  Workspace allocate(const Problem &, const Execution &, uint64_t bytes) const override; // from the stream's memory pool
  void run(const Problem &, const Execution &, Operation, const Plan &, void *workspace) const override;
  // plan() for a device that may be only described.
  Answer plan_on(const Device &, const Problem &, Operation) const;

protected:
  // Whether the family supports parts of larger problems, and can add to existing gradients.
  virtual bool computes_parts() const { return false; }
  // Whether the family's forward supports a page table.
  virtual bool reads_pages() const { return false; }
  // Whether the family's forward reads quantised K and V.
  virtual bool reads_quantised() const { return false; }
  // Whether a thread holds many scores. The compiler evaluates functions for each of them, so long functions take minutes to compile and
  // spill kilobytes.
  virtual bool unrolls_functions() const { return true; }
  // The program for a call whose addresses are marks.
  virtual Made program(const Problem &, Operation, const Device &, Scratch &) const = 0;

private:
  // The tuned tile, which is requested if the caller requests none; null if there is none.
  const TunedTile *tuned(const Problem &, Operation, const Device &) const;
};

// The program that a plan of a CudaEngine runs.
const Program &program_of(const Plan &);

} // namespace strobe::cuda
