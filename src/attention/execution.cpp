// Checks strobe_execution and resolves its defaults.
#include <thread>
#if defined(__linux__)
#include <sched.h>
#endif

#include "attention/versioned.h"
#include "attention/workspace.h"

namespace strobe {
namespace {

// The number of processors that this process may run on.
int32_t usable_processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::min<int32_t>(CPU_COUNT(&set), STROBE_MAX_THREADS);
#endif
  return std::clamp<int32_t>(static_cast<int32_t>(std::thread::hardware_concurrency()), 1, STROBE_MAX_THREADS);
}

} // namespace

Execution validate(const strobe_execution *execution) {
  Execution result;
  Reasons reasons;
  strobe_execution e{};
  if (execution) e = read_versioned("execution", execution, reasons);
  if (e.threads < 0 || e.threads > STROBE_MAX_THREADS)
    reasons.add("execution.threads", Code::value, "{0}; accepted is 1 to {1}, or {2} for as many as the process may run on", e.threads,
                int(STROBE_MAX_THREADS), Absent{"0"});
  if (e.reserved_sms < 0)
    reasons.add("execution.reserved_sms", Code::value, "{0}; accepted is 0 to one fewer than the GPU has", e.reserved_sms);
  if (reinterpret_cast<uintptr_t>(e.workspace) % kWorkspaceAlignment)
    reasons.add("execution.workspace", Code::memory, "{0}; accepted is an address aligned to {1} bytes", e.workspace, kWorkspaceAlignment);
  if (!e.workspace && e.workspace_bytes)
    reasons.add("execution.workspace", Code::memory, "null, with workspace_bytes {0}; accepted is null with 0, or memory of that size",
                e.workspace_bytes);
  reasons.raise_if_any();

#define STROBE_EXECUTION(name) result.name = e.name;
#include "strobe/fields.inc"
  if (!result.threads) result.threads = usable_processors();
  return result;
}

} // namespace strobe
