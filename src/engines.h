// What the ABI asks of the list of engines.
#pragma once
#include "engine.h"

namespace strobe {

// The reason why an engine cannot run on this machine; empty if it can. It is determined once, because that takes system calls.
const std::string &missing(const Engine &);

// Throws Refused unless `wanted` is null, empty or the name of an engine.
void check_engine(const char *wanted);

// Whether this row is an engine's form for another device, while the engine also has a form for the problem's device.
bool stands_elsewhere(const Choice::Row &, const Choice &, const Problem &);

// The engine that runs, with its plan. Throws Error(STROBE_UNSUPPORTED) if no engine supports the problem; or if `strict` forbids the
// engine that does, because an engine further up the list is available and supports this dtype and shape, but not with these options.
struct Decision {
  const Engine *engine;
  const Plan &plan;
};
Decision decide(const Problem &, const Execution &, Operation, const Choice &);

// A report of the choice: the call, each engine's plan or reason, the choice and its notes.
std::string explain(const Problem &, const Execution &, Operation, const Choice &);

} // namespace strobe
