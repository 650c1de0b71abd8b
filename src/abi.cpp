// The C ABI: converts its structs to the core's, and exceptions to a status.
#include <cstring>
#include <memory>
#include <new>

#include "attention/dropout_mask.h"
#include "attention/padding.h"
#include "attention/reasons.h"
#include "attention/versioned.h"
#include "cuda/compile/cache.h"
#include "cuda/compile/info.h"
#include "cuda/program/mask_blocks.h"
#include "cuda/program/prewarm.h"
#include "cuda/program/tuning.h"
#include "prepared.h"
#include "reference/reference.h"
#include "score/blocks.h"

#define STROBE_STRING_(x) #x
#define STROBE_STRING(x) STROBE_STRING_(x)

struct strobe_prepared {
  strobe::Prepared call;
};

namespace strobe {
namespace {

// This thread's last failure, also with its refusals as the C structs that strobe_last_refusal() returns.
struct Failure {
  std::string text;
  std::vector<Refusal> refusals;
  std::vector<std::vector<strobe_value>> values; // one vector per refusal
  std::vector<std::vector<const strobe_value *>> pointers;
  std::vector<strobe_refusal> shown;

  Failure() = default;
  Failure(const char *what, std::vector<Refusal> all)
      : text(what), refusals(std::move(all)), values(refusals.size()), pointers(refusals.size()) {
    for (size_t n = 0; n < refusals.size(); n++) {
      const Refusal &r = refusals[n];
      for (const Value &value : r.values) values[n].push_back(value.shown());
      for (const strobe_value &value : values[n]) pointers[n].push_back(&value);
      shown.push_back({sizeof(strobe_refusal), r.argument, static_cast<int32_t>(r.code), static_cast<int32_t>(r.values.size()), r.words,
                       pointers[n].data()});
    }
  }
};
thread_local Failure last;

int32_t fail(strobe_status status, const char *what, const std::vector<Refusal> &refusals = {}) noexcept {
  try {
    last = Failure(what, refusals); // the vectors keep their addresses when moved
  } catch (...) {
    last = {}; // no memory is left for the text
  }
  return status;
}

// No exception leaves the library.
template <class F> int32_t guarded(F &&body) noexcept {
  try {
    body();
    return STROBE_OK;
  } catch (const Refused &e) {
    return fail(e.status, e.what(), e.refusals);
  } catch (const Error &e) {
    return fail(e.status, e.what());
  } catch (const std::bad_alloc &) {
    return fail(STROBE_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception &e) {
    return fail(STROBE_INTERNAL, e.what());
  } catch (...) {
    return fail(STROBE_INTERNAL, "unknown exception");
  }
}

Operation checked(int32_t direction) {
  if (direction < 0 || direction >= kOperations)
    refuse("direction", Code::value, "{0}; accepted is {1} (forward), {2} (backward), {3} (jvp) or {4} (backward_jvp)", direction,
           int(STROBE_FORWARD), int(STROBE_BACKWARD), int(STROBE_JVP), int(STROBE_BACKWARD_JVP));
  return static_cast<Operation>(direction);
}

void run(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e, Operation operation) {
  const Call call(a, t, e, operation);
  perform(call.decision(), call.problem, call.execution, operation);
}

void check_plan(const strobe_plan *plan) {
  Reasons reasons;
  if (!plan)
    reasons.add("plan", Code::missing, "missing; accepted is a pointer to a strobe_plan");
  else
    size_is_sane<strobe_plan>("plan", plan->size, reasons);
  reasons.raise_if_any();
}

void write_plan(const Plan &chosen, strobe_plan *plan) {
  strobe_plan result{};
  result.size = plan->size;
#define STROBE_PLAN(name) result.name = chosen.name;
#include "strobe/fields.inc"
  std::memcpy(plan, &result, std::min<size_t>(plan->size, sizeof result));
}

void check_prepared(const strobe_prepared *prepared) {
  if (!prepared) refuse("prepared", Code::missing, "null; accepted is what strobe_prepare wrote");
}

void run_reference(const strobe_attention *attention, const strobe_tensors *t, const strobe_execution *e, const strobe_selection *selection,
                   Operation operation) {
  Reasons reasons;
  strobe_attention a = read_versioned("attention", attention, reasons);
  strobe_selection selected{};
  if (selection) selected = read_versioned("selection", selection, reasons);
  reasons.raise_if_any();
  a.engine = reference_engine()->name();
  Problem problem;
  Execution execution;
  check_all([&] { problem = validate(&a, t, operation); }, [&] { execution = validate(e); });
  if (problem.device_type != STROBE_CPU)
    refuse("q", Code::device, "on a CUDA device; accepted are tensors on the CPU, where the reference computes");
  reference(problem, execution, operation, selection ? &selected : nullptr);
  if (!selected.rows) clear_padding_of_queries(problem, execution, operation);
  if (!selected.cols) clear_padding_of_keys(problem, execution, operation);
}

void check_text(const char *text, size_t capacity) {
  if (!text && capacity) refuse("text", Code::missing, "null; accepted is memory of `capacity` bytes, or null with capacity 0");
}

void write_text(const std::string &all, char *text, size_t capacity, size_t *needed) {
  if (needed) *needed = all.size() + 1;
  if (!capacity) return;
  const size_t length = std::min(all.size(), capacity - 1);
  std::memcpy(text, all.data(), length);
  text[length] = 0;
}

const Engine *engine_at(int32_t index) {
  const auto &list = engines();
  return index >= 0 && static_cast<size_t>(index) < list.size() ? list[index] : nullptr;
}

// Writes the text that `says` returns about a call's kernels on a GPU of this compute capability. The GPU need not be present.
int32_t ahead_of_time(std::string (*says)(const Problem &, Operation, int cc), const strobe_attention *a, const strobe_tensors *t,
                      int32_t direction, int32_t compute_capability, char *text, size_t capacity, size_t *needed) {
  return guarded([&] {
    check_text(text, capacity);
    const Problem problem = validate(a, t, checked(direction));
    if (problem.device_type != STROBE_CUDA) refuse("q", Code::device, "on the CPU; accepted is a tensor on a CUDA device");
    write_text(says(problem, checked(direction), compute_capability), text, capacity, needed);
  });
}

} // namespace
} // namespace strobe

using namespace strobe;

const char *strobe_version(void) {
  return STROBE_STRING(STROBE_VERSION_MAJOR) "." STROBE_STRING(STROBE_VERSION_MINOR) "." STROBE_STRING(STROBE_VERSION_PATCH);
}

const char *strobe_last_error(void) { return last.text.c_str(); }

const strobe_refusal *strobe_last_refusal(size_t n) { return n < last.shown.size() ? &last.shown[n] : nullptr; }

const char *strobe_status_name(int32_t status) {
  switch (status) {
  case STROBE_OK:
    return "ok";
  case STROBE_INVALID_ARGUMENT:
    return "invalid argument";
  case STROBE_UNSUPPORTED:
    return "unsupported";
  case STROBE_OUT_OF_MEMORY:
    return "out of memory";
  case STROBE_DEVICE_ERROR:
    return "device error";
  case STROBE_INTERNAL:
    return "internal error";
  }
  return "unknown status";
}

int32_t strobe_forward(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e) {
  return guarded([&] { run(a, t, e, Operation::forward); });
}

int32_t strobe_backward(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e) {
  return guarded([&] { run(a, t, e, Operation::backward); });
}

int32_t strobe_jvp(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e) {
  return guarded([&] { run(a, t, e, Operation::jvp); });
}

int32_t strobe_backward_jvp(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e) {
  return guarded([&] { run(a, t, e, Operation::backward_jvp); });
}

int32_t strobe_make_plan(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e, int32_t direction,
                         strobe_plan *plan) {
  return guarded([&] {
    check_plan(plan);
    const Call call(a, t, e, checked(direction));
    write_plan(call.decision().plan, plan);
  });
}

int32_t strobe_prepare(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e, int32_t direction,
                       strobe_prepared **prepared) {
  return guarded([&] {
    if (!prepared) refuse("prepared", Code::missing, "null; accepted is where to write the prepared call");
    *prepared = new strobe_prepared{{a, t, e, checked(direction)}};
  });
}

int32_t strobe_prepared_plan(const strobe_prepared *prepared, strobe_plan *plan) {
  return guarded([&] {
    check_prepared(prepared);
    check_plan(plan);
    write_plan(prepared->call.plan(), plan);
  });
}

int32_t strobe_run(const strobe_prepared *prepared, const strobe_addresses *addresses, const strobe_execution *e) {
  return guarded([&] {
    check_prepared(prepared);
    prepared->call.run(addresses, e);
  });
}

void strobe_release(strobe_prepared *prepared) { delete prepared; }

int32_t strobe_workspace_size(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e, int32_t direction,
                              uint64_t *bytes) {
  return guarded([&] {
    if (!bytes) refuse("bytes", Code::missing, "null; accepted is where to write the size");
    const Call call(a, t, e, checked(direction));
    *bytes = call.decision().plan.workspace_bytes;
  });
}

int32_t strobe_explain(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e, int32_t direction, char *text,
                       size_t capacity, size_t *needed) {
  return guarded([&] {
    check_text(text, capacity);
    const Call call(a, t, e, checked(direction));
    write_text(explain(call.problem, call.execution, call.operation, call.choice), text, capacity, needed);
  });
}

int32_t strobe_add_kernel_folder(const char *folder) {
  return guarded([&] {
    if (!folder) refuse("folder", Code::missing, "null; accepted is a path");
    if (!*folder) refuse("folder", Code::value, "empty; accepted is a path");
    cuda::cache_add(folder);
  });
}

int32_t strobe_cuda_info(char *text, size_t capacity, size_t *needed) {
  return guarded([&] {
    check_text(text, capacity);
    write_text(cuda::info(), text, capacity, needed);
  });
}

int32_t strobe_tuning(int32_t device_index, char *text, size_t capacity, size_t *needed) {
  return guarded([&] {
    check_text(text, capacity);
    write_text(cuda::tuning_header(cuda::device(device_index)), text, capacity, needed);
  });
}

const char *strobe_engine_name(int32_t index) {
  const char *name = nullptr;
  guarded([&] {
    if (const Engine *engine = engine_at(index)) name = engine->name();
  });
  return name;
}

int32_t strobe_prewarm(const strobe_attention *a, const strobe_tensors *t, int32_t direction, int32_t compute_capability, char *text,
                       size_t capacity, size_t *needed) {
  return ahead_of_time(cuda::prewarm, a, t, direction, compute_capability, text, capacity, needed);
}

int32_t strobe_kernels(const strobe_attention *a, const strobe_tensors *t, int32_t direction, int32_t compute_capability, char *text,
                       size_t capacity, size_t *needed) {
  return ahead_of_time(cuda::kernels, a, t, direction, compute_capability, text, capacity, needed);
}

const char *strobe_engine_missing(int32_t index) {
  const char *missing = nullptr;
  guarded([&] {
    const Engine *engine = engine_at(index);
    if (engine && !strobe::missing(*engine).empty()) missing = strobe::missing(*engine).c_str();
  });
  return missing;
}

int32_t strobe_dropout_mask(const strobe_attention *a, const strobe_tensor *rng, const strobe_tensor *keep, const strobe_execution *e) {
  return guarded([&] { dropout_mask(a, rng, keep, e); });
}

int32_t strobe_mask_blocks(const strobe_block_mask *mask, strobe_kept_blocks *kept) {
  return guarded([&] {
    score::MaskProblem problem(mask, kept);
    problem.mask.device_type == STROBE_CUDA ? cuda::mask_blocks(problem) : score::mask_blocks(problem);
    problem.write(kept);
  });
}

int32_t strobe_reference_forward(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e, const strobe_selection *s) {
  return guarded([&] { run_reference(a, t, e, s, Operation::forward); });
}

int32_t strobe_reference_backward(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e,
                                  const strobe_selection *s) {
  return guarded([&] { run_reference(a, t, e, s, Operation::backward); });
}
