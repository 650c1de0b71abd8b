#include "prepared.h"

#include <cstring>

#include "attention/contents.h"
#include "attention/versioned.h"

namespace strobe {
namespace {

void move(View &view, void *address) {
  if (view) view.data = static_cast<char *>(address); // a tensor without elements has no view
}
void move(Captured &captured, void *address) { captured.data = static_cast<char *>(address); }
template <class T> void move(const T *&ints, void *address) {
  if (address) ints = static_cast<const T *>(address); // a list without entries may have no address
}

struct Field {
  const char *name;
  const strobe_tensor *strobe_tensors::*tensor;
  void *strobe_addresses::*address;
  void (*move)(Problem &, void *address);
};
constexpr Field kFields[] = {
#define STROBE_TENSOR(name, place)                                                                                                         \
  {#name, &strobe_tensors::name, &strobe_addresses::name, [](Problem &p, void *address) { move(p.place, address); }},
#include "strobe/fields.inc"
};

bool on_16_bytes(const void *address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

} // namespace

Prepared::Prepared(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e, Operation operation)
    : operation_(operation) {
  const Call call(a, t, e, operation, &placed_);
  const Decision decision = call.decision();
  problem_ = call.problem, problem_.lists.reset(); // each run has its own copies of lists
  threads_ = call.execution.threads, reserved_sms_ = call.execution.reserved_sms, engine_ = decision.engine, plan_ = decision.plan;

  Reasons none; // stays empty: the reasons against the call were thrown when it was prepared
  const strobe_tensors given = read_versioned("tensors", t, none);
  for (const Field &field : kFields) {
    Was &was = was_.emplace_back();
    const strobe_tensor *tensor = given.*field.tensor;
    if (!tensor) continue;
    was.present = true, was.address = static_cast<const char *>(tensor->data);
    for (size_t i = 0; i < placed_.size(); i++)
      if (!std::strcmp(placed_[i].argument, field.name)) was.placed = static_cast<int32_t>(i);
  }
}

void Prepared::run(const strobe_addresses *addresses, const strobe_execution *e) const {
  Reasons reasons;
  const strobe_addresses at = read_versioned("addresses", addresses, reasons);
  reasons.raise_if_any();
  Problem problem = problem_;
  std::vector<Placed> placed = placed_;
  for (size_t i = 0; i < std::size(kFields); i++) {
    const Field &field = kFields[i];
    const Was &was = was_[i];
    void *address = at.*field.address;
    if (!was.present) {
      if (address)
        reasons.add(field.name, Code::excluded, "given, where the call was prepared without one; accepted is {0}", Absent{"null"});
      continue;
    }
    if (was.placed < 0) continue; // this operation does not use the tensor
    Footprint &bytes = placed[was.placed].bytes;
    if (bytes.begin == bytes.end) continue;
    if (!address) {
      reasons.add(field.name, Code::memory, "null; accepted is null only for a tensor without elements");
    } else if (on_16_bytes(address) != on_16_bytes(was.address)) {
      reasons.add(field.name, Code::memory,
                  on_16_bytes(address)
                      ? "address {0}; accepted is none that is a multiple of 16, for it was none when the call was prepared"
                      : "address {0}; accepted are multiples of 16, for it was one when the call was prepared",
                  address);
    } else if (reinterpret_cast<uintptr_t>(address) % bytes.element) {
      reasons.add(field.name, Code::memory, "address {0}; accepted are multiples of {1}, the size of its element", address, bytes.element);
    }
    const int64_t shift = static_cast<const char *>(address) - was.address;
    bytes.begin += shift, bytes.end += shift;
    field.move(problem, address);
  }
  problem.set_page_table(problem.page_table());
  reasons.raise_if_any();
  check_overlaps(placed, reasons);
  strobe_execution how{};
  if (e) how = read_versioned("execution", e, reasons);
  if (how.threads && how.threads != threads_)
    reasons.add("execution.threads", Code::value, "{0}; accepted is {1}, as prepared, or {2} for the same", how.threads, threads_,
                Absent{"0"});
  if (how.reserved_sms && how.reserved_sms != reserved_sms_)
    reasons.add("execution.reserved_sms", Code::value,
                reserved_sms_ ? "{0}; accepted is {1}, as prepared, or {2} for the same" : "{0}; accepted is {1}, as prepared",
                how.reserved_sms, reserved_sms_, Absent{"0"});
  reasons.raise_if_any();
  if (const auto lists = own_lists(problem)) check_contents(problem, [&](const int32_t *list, int64_t) { return lists->at(list); });
  how.size = sizeof how, how.threads = threads_, how.reserved_sms = reserved_sms_;
  const Execution execution = validate(&how);
  if (update_longest(problem)) // the lengths are others: the call is planned again
    perform(decide(problem, execution, operation_, choose(problem, execution, operation_)), problem, execution, operation_);
  else
    perform({engine_, plan_}, problem, execution, operation_);
}

} // namespace strobe
