#include "prepared.h"

#include "attention/versioned.h"

namespace strobe {
namespace {

struct Field {
  const char *name;
  const strobe_tensor *strobe_tensors::*tensor;
  void *strobe_addresses::*address;
};
#define STROBE_FIELD(name) {#name, &strobe_tensors::name, &strobe_addresses::name}
constexpr Field kFields[] = {
    STROBE_FIELD(q),
    STROBE_FIELD(k),
    STROBE_FIELD(v),
    STROBE_FIELD(mask),
    STROBE_FIELD(bias),
    STROBE_FIELD(alibi_slopes),
    STROBE_FIELD(sinks),
    STROBE_FIELD(cu_seqlens_q),
    STROBE_FIELD(cu_seqlens_k),
    STROBE_FIELD(block_rows),
    STROBE_FIELD(block_cols),
    STROBE_FIELD(block_rows_t),
    STROBE_FIELD(block_cols_t),
    STROBE_FIELD(rng),
    STROBE_FIELD(out),
    STROBE_FIELD(lse),
    STROBE_FIELD(dout),
    STROBE_FIELD(dlse),
    STROBE_FIELD(dq),
    STROBE_FIELD(dk),
    STROBE_FIELD(dv),
    STROBE_FIELD(dbias),
    STROBE_FIELD(dsinks),
};
#undef STROBE_FIELD
static_assert(sizeof(strobe_tensors) == sizeof(uint64_t) + std::size(kFields) * sizeof(void *), "a tensor is missing from kFields");
static_assert(sizeof(strobe_addresses) == sizeof(strobe_tensors), "strobe_addresses and strobe_tensors name the same tensors");

bool on_16_bytes(const void *address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

} // namespace

Prepared::Prepared(const strobe_attention *a, const strobe_tensors *t, const strobe_execution *e, Direction direction)
    : direction_(direction) {
  static_assert(kMostTensors == std::size(kFields));
  const Call call(a, t, e, direction);
  const Decision decision = call.decision();
  engine_ = decision.engine, plan_ = decision.plan, threads_ = call.execution.threads;

  Reasons none; // after the call's own
  attention_ = read_versioned("attention", a, none);
  if (attention_.engine) engine_name_ = attention_.engine, attention_.engine = engine_name_.c_str();
  const strobe_tensors given = read_versioned("tensors", t, none);
  for (size_t i = 0; i < kMostTensors; i++)
    if (const strobe_tensor *tensor = given.*kFields[i].tensor) present_[i] = true, tensors_[i] = *tensor;
}

void Prepared::run(const strobe_addresses *addresses, const strobe_execution *e) const {
  Reasons reasons;
  const strobe_addresses at = read_versioned("addresses", addresses, reasons);
  reasons.raise_if_any();
  Tensors views;
  strobe_tensors t{};
  t.size = sizeof t;
  for (size_t i = 0; i < kMostTensors; i++) {
    const Field &field = kFields[i];
    void *address = at.*field.address;
    if (!present_[i]) {
      if (address) reasons.add(field.name, "given, where the call was prepared without one; accepted is null");
      continue;
    }
    if (on_16_bytes(address) != on_16_bytes(tensors_[i].data))
      reasons.add(field.name, "address ", static_cast<const void *>(address), "; accepted ",
                  on_16_bytes(address) ? "is none that is a multiple of 16, for it was none" : "are multiples of 16, for it was one",
                  " when the call was prepared");
    views[i] = tensors_[i];
    views[i].data = address;
    t.*field.tensor = &views[i];
  }
  reasons.raise_if_any();

  strobe_execution how{};
  if (e) how = read_versioned("execution", e, reasons);
  if (how.threads && how.threads != threads_)
    reasons.add("execution.threads", how.threads, "; accepted is ", threads_, ", as prepared, or 0 for the same");
  reasons.raise_if_any();
  how.size = sizeof how, how.threads = threads_;
  perform({engine_, plan_}, validate(&attention_, &t, direction_), validate(&how), direction_);
}

} // namespace strobe
