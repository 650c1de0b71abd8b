#include "call.h"

#include "attention/padding.h"
#include "attention/text.h"
#include "attention/versioned.h"

namespace strobe {

Call::Call(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e, Operation operation, std::vector<Placed> *placed)
    : operation(operation) {
  Reasons told; // validate() adds its reasons here
  check_all([&] { problem = validate(a, t, operation, placed); }, [&] { execution = validate(e); },
            [&] { check_engine(read_versioned("attention", a, told).engine); });
  choice = choose(problem, execution, operation);
}

void perform(const Decision &decision, const Problem &problem, const Execution &execution, Operation operation) {
  const auto &[engine, plan] = decision;
  Workspace own;
  void *workspace = execution.workspace;
  if (!workspace && plan.workspace_bytes) {
    if (execution.allocate) {
      workspace = execution.allocate(execution.allocator, plan.workspace_bytes);
      if (!workspace) throw Error(STROBE_OUT_OF_MEMORY, text("execution.allocate: no workspace of ", plan.workspace_bytes, " bytes"));
    } else {
      own = engine->allocate(problem, execution, plan.workspace_bytes);
      workspace = own.get();
    }
  } else if (execution.workspace_bytes < plan.workspace_bytes) {
    refuse("execution.workspace_bytes", Code::value, "{0}; accepted is {1} or more, as strobe_workspace_size() says",
           execution.workspace_bytes, plan.workspace_bytes);
  }
  engine->run(problem, execution, operation, plan, workspace);
  if (engine->device_type() == STROBE_CPU) clear_padding(problem, execution, operation);
}

} // namespace strobe
