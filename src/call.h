// A call on its way from the ABI to an engine.
#pragma once
#include "attention/reasons.h"
#include "engines.h"

namespace strobe {

// A validated call with the answers of all engines.
struct Call {
  Problem problem;
  Execution execution;
  Operation operation;
  Choice choice;

  Call(const strobe_attention *, const strobe_tensors *, const strobe_execution *, Operation, std::vector<Placed> *placed = nullptr);
  Decision decision() const { return decide(problem, execution, operation, choice); }
};

// Runs the plan in the caller's workspace, or in one from the execution's allocator.
void perform(const Decision &, const Problem &, const Execution &, Operation);

// Makes all checks, and throws their refusals together.
template <class... Checks> void check_all(Checks &&...checks) {
  Reasons found;
  auto run = [&](auto &check) {
    try {
      check();
    } catch (const Refused &e) {
      found.add(e.refusals);
    }
  };
  (run(checks), ...);
  found.raise_if_any();
}

} // namespace strobe
