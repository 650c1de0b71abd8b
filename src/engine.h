// The interface of an engine: it answers a problem with a plan or with the reason against it, and runs its plans.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "attention/attention.h"

namespace strobe {

struct Plan {
  const char *engine = nullptr;
  std::string kernel;             // a description of what runs, e.g. "fp32 FMA, 16 lanes, 4x4 accumulators"
  int64_t tile_q = 0, tile_k = 0; // the tile (Br, Bc) that runs
  uint64_t workspace_bytes = 0;
  double predicted_seconds = 0;
  std::vector<std::string> notes;      // what was rounded or replaced, and why; explain() prints them
  std::shared_ptr<const void> program; // what the engine keeps from planning, for run()
};

using Workspace = std::unique_ptr<void, std::function<void(void *)>>;
using Answer = std::variant<Plan, std::string>; // a plan, or the reason against the problem

class Engine {
public:
  virtual ~Engine() = default;
  virtual const char *name() const = 0;
  virtual int32_t device_type() const { return STROBE_CPU; } // the device of the tensors that the engine accepts
  // The reason why this engine cannot run on this machine at all; empty if it can. Only engines of the problem's device are asked, because
  // a CUDA driver that has been initialised cannot be used after a fork.
  virtual std::string missing() const = 0;
  // Whether the engine runs only if asked for by name (the reference, the ladder).
  virtual bool only_by_name() const { return false; }
  // Whether the engine has this operation at all. Its plan() is asked for no other one.
  virtual bool computes(Operation operation) const { return operation == Operation::forward || operation == Operation::backward; }
  virtual Answer plan(const Problem &, const Execution &, Operation) const = 0;
  // A workspace for one call, freed when the call returns.
  virtual Workspace allocate(const Problem &, const Execution &, uint64_t bytes) const;
  // Runs a plan. The workspace holds at least plan.workspace_bytes, 256-byte aligned.
  virtual void run(const Problem &, const Execution &, Operation, const Plan &, void *workspace) const = 0;
};

// All engines, as src/engines.cpp lists them.
const std::vector<const Engine *> &engines();
// Every engine's answer, and the chosen engine: the one whose plan has the least predicted time.
struct Choice {
  struct Row {
    const Engine *engine;
    Answer answer;
  };
  std::vector<Row> rows;
  int chosen = -1;      // index into rows; -1: none
  bool follows = false; // the engine of the same call's forward was chosen, whatever the predicted times
};
Choice choose(const Problem &, const Execution &, Operation);
// choose() with the answers of `ask`, possibly for another machine. `ask` is called for each engine of the problem's device, with the
// problem and with variants of it.
using Ask = std::function<Answer(const Engine &, const Problem &, Operation)>;
Choice choose(const Problem &, Operation, const Ask &);

} // namespace strobe
