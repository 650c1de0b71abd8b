#include "engines.h"

#include <algorithm>
#include <mutex>
#include <new>

#include "attention/refusal.h"
#include "attention/text.h"
#include "attention/workspace.h"
#include "cpu/engine.h"
#include "cuda/families/families.h"
#include "ladder/engine.h"
#include "reference/reference.h"

namespace strobe {

Workspace Engine::allocate(const Problem &, const Execution &, uint64_t bytes) const {
  constexpr std::align_val_t alignment{kWorkspaceAlignment};
  void *memory = ::operator new(bytes, alignment, std::nothrow);
  if (!memory) throw Error(STROBE_OUT_OF_MEMORY, text("no host memory for a workspace of ", bytes, " bytes"));
  return Workspace(memory, [](void *memory) { ::operator delete(memory, alignment); });
}

// Device by device, from the fastest family to the slowest. `strict` relies on this order. Each rung of the ladder has two entries of the
// same name, one for each device.
const std::vector<const Engine *> &engines() {
  static const std::vector<const Engine *> list = [] {
    std::vector<const Engine *> all = cuda_engines();
    for (const Engine *engine : cpu_engines()) all.push_back(engine);
    for (const Engine *engine : cpu_ladder_engines()) all.push_back(engine);
    all.push_back(reference_engine());
    return all;
  }();
  return list;
}

const std::string &missing(const Engine &engine) {
  struct Reason {
    std::once_flag once;
    std::string text;
  };
  static std::vector<Reason> reasons(engines().size());
  Reason &reason = reasons[static_cast<size_t>(std::ranges::find(engines(), &engine) - engines().begin())];
  std::call_once(reason.once, [&] { reason.text = engine.missing(); });
  return reason.text;
}

void check_engine(const char *wanted) {
  if (!wanted || !*wanted) return;
  std::vector<std::string> names; // each name once, because some engines have a form for each device
  for (const Engine *engine : engines()) {
    if (engine->name() == std::string(wanted)) return;
    if (std::find(names.begin(), names.end(), engine->name()) == names.end()) names.push_back(engine->name());
  }
  std::string accepted;
  for (const std::string &name : names) accepted += (accepted.empty() ? "" : ", ") + name;
  const char *elsewhere = foreign_architecture(wanted);
  if (elsewhere)
    refuse("engine", Code::elsewhere, "\"{0}\" runs on {3} alone; accepted are {1}, or {2} for the fastest", wanted, accepted,
           Absent{"none"}, elsewhere);
  refuse("engine", Code::unknown, "\"{0}\" is unknown; accepted are {1}, or {2} for the fastest", wanted, accepted, Absent{"none"});
}

// Gives the tensor adjacent elements and an invented address, with the alignment that every engine accepts.
static void make_dense(View &x, int64_t heads, int64_t rows, int64_t width) {
  if (!x) return;
  x.data = reinterpret_cast<char *>(uintptr_t{256});
  x.stride[3] = 1, x.stride[2] = width, x.stride[1] = rows * width, x.stride[0] = heads * rows * width;
}
// The problem with dense tensors. It is planned, but not run.
static Problem stored_densely(Problem p) {
  const int64_t rows_q = p.varlen ? p.total_q : p.seqlen_q, rows_k = p.page_size ? p.page_size : p.varlen ? p.total_k : p.seqlen_k;
  for (View *x : {&p.q, &p.dq, &p.tq}) make_dense(*x, p.heads, rows_q, p.head_dim);
  for (View *x : {&p.k, &p.dk, &p.tk}) make_dense(*x, p.heads_kv, rows_k, p.stored(p.head_dim));
  for (View *x : {&p.v, &p.dv, &p.tv}) make_dense(*x, p.heads_kv, rows_k, p.stored(p.head_dim_v));
  for (View *x : {&p.out, &p.dout, &p.tout, &p.tdout}) make_dense(*x, p.heads, rows_q, p.head_dim_v);
  return p;
}

// Whether the backward prefers the engine that the forward of the same call would choose. The backward's P is exp(S - LSE). In FP32, two
// engines on a GPU round S so differently that P would break the contract if S and LSE came from different engines.
static bool follows_forward(const Problem &problem, Operation operation) {
  return writes(operation, kGradients) && problem.wishes.engine.empty() && problem.dtype == DType::f32 && problem.device_type != STROBE_CPU;
}

static Answer asked(const Ask &ask, const Engine &engine, const Problem &problem, Operation operation) {
  if (!engine.computes(operation)) return text("does not compute ", name(operation));
  return ask(engine, problem, operation);
}

// With `invariant`, the choice is the first engine that would support the call if its tensors were dense. If that engine does not support
// the actual strides, no other engine is chosen, because two engines give different bits.
static void choose_first(Choice &choice, const Problem &problem, Operation operation, const Ask &ask) {
  const Problem dense = stored_densely(problem);
  choice.chosen = -1;
  for (size_t i = 0; i < choice.rows.size(); i++) {
    const Engine &engine = *choice.rows[i].engine;
    if (engine.device_type() != problem.device_type || !std::holds_alternative<Plan>(asked(ask, engine, dense, operation))) continue;
    if (std::holds_alternative<Plan>(choice.rows[i].answer)) {
      choice.chosen = static_cast<int>(i);
      return;
    }
    for (Choice::Row &row : choice.rows)
      if (std::holds_alternative<Plan>(row.answer))
        row.answer =
            text("has other bits than ", engine.name(), ", which is the engine of this dtype, head dimensions and options where ",
                 "invariant is given, and which does not take these strides or addresses: give tensors that it takes, or name an engine");
    return;
  }
}

Choice choose(const Problem &problem, Operation operation, const Ask &ask) {
  Choice choice;
  double least = 0;
  for (const Engine *engine : engines()) {
    Answer answer = engine->device_type() == problem.device_type ? asked(ask, *engine, problem, operation)
                    : problem.device_type == STROBE_CPU          ? "the tensors are on the CPU"
                                                                 : "the tensors are on a CUDA device";
    if (const Plan *plan = std::get_if<Plan>(&answer); plan && (problem.wishes.engine.empty() || problem.wishes.engine == engine->name()))
      if (choice.chosen < 0 || plan->predicted_seconds < least) {
        choice.chosen = static_cast<int>(choice.rows.size());
        least = plan->predicted_seconds;
      }
    choice.rows.push_back({engine, std::move(answer)});
  }
  if (problem.invariant && problem.wishes.engine.empty()) choose_first(choice, problem, operation, ask);
  if (choice.chosen >= 0 && follows_forward(problem, operation)) {
    const int same = choose(problem, Operation::forward, ask).chosen; // an index into the rows of either choice, which has one per engine
    if (same >= 0 && same != choice.chosen && std::holds_alternative<Plan>(choice.rows[same].answer))
      choice.chosen = same, choice.follows = true;
  }
  return choice;
}

Choice choose(const Problem &problem, const Execution &execution, Operation operation) {
  return choose(problem, operation, [&](const Engine &engine, const Problem &problem, Operation operation) -> Answer {
    if (const std::string &reason = missing(engine); !reason.empty()) return reason;
    if (engine.only_by_name() && problem.wishes.engine != engine.name()) return "runs only when asked for by name";
    return engine.plan(problem, execution, operation);
  });
}

// The problem with dense tensors, and without any option that is not copied here. It is planned, but not run.
static Problem without_options(const Problem &p) {
  Problem plain;
  plain.batch = p.batch, plain.heads = p.heads, plain.heads_kv = p.heads_kv, plain.head_dim = p.head_dim, plain.head_dim_v = p.head_dim_v;
  plain.seqlen_q = p.seqlen_q, plain.seqlen_k = p.seqlen_k, plain.varlen = p.varlen, plain.total_q = p.total_q, plain.total_k = p.total_k;
  plain.most_q = p.most_q, plain.most_k = p.most_k, plain.cu_seqlens_q = p.cu_seqlens_q, plain.cu_seqlens_k = p.cu_seqlens_k;
  plain.lists = p.lists, plain.forms = p.forms;
  plain.dtype = p.dtype, plain.device_type = p.device_type, plain.device_index = p.device_index;
  plain.scale = p.scale, plain.bottom_right = p.bottom_right, plain.allow_tf32 = p.allow_tf32; // no engine refuses these
  for (auto tensor :
       {&Problem::q, &Problem::k, &Problem::v, &Problem::out, &Problem::lse, &Problem::dout, &Problem::dlse, &Problem::dq, &Problem::dk,
        &Problem::dv, &Problem::tq, &Problem::tk, &Problem::tv, &Problem::tdout, &Problem::tdlse, &Problem::tout, &Problem::tlse})
    plain.*tensor = p.*tensor;
  for (View *x : {&plain.k, &plain.v}) {
    x->page_size = x->pages_each = 0, x->page_table = nullptr;
    if (*x) x->dtype = p.dtype; // without quantisation
  }
  return stored_densely(std::move(plain));
}

bool stands_elsewhere(const Choice::Row &row, const Choice &choice, const Problem &problem) {
  auto here = [&](const Engine *engine) { return engine->device_type() == problem.device_type; };
  return !here(row.engine) && std::any_of(choice.rows.begin(), choice.rows.end(), [&](const Choice::Row &other) {
    return here(other.engine) && std::string(other.engine->name()) == row.engine->name();
  });
}

Decision decide(const Problem &problem, const Execution &execution, Operation operation, const Choice &choice) {
  if (choice.chosen < 0) {
    std::string reasons;
    for (const Choice::Row &row : choice.rows)
      if ((problem.wishes.engine.empty() || problem.wishes.engine == row.engine->name()) && !stands_elsewhere(row, choice, problem))
        reasons += text("\n", row.engine->name(), ": ", std::get<std::string>(row.answer));
    throw Error(STROBE_UNSUPPORTED, (problem.wishes.engine.empty() ? "no engine takes this problem:"
                                                                   : "the engine that was asked for cannot take this problem:") +
                                        reasons);
  }
  const Choice::Row &chosen = choice.rows[choice.chosen];
  for (int i = 0; problem.strict && i < choice.chosen; i++) {
    const auto &[engine, answer] = choice.rows[i];
    if (engine->only_by_name() || engine->device_type() != problem.device_type || !engine->missing().empty()) continue;
    if (const Plan *plan = std::get_if<Plan>(&answer)) {
      if (!choice.follows && plan->predicted_seconds < std::get<Plan>(chosen.answer).predicted_seconds)
        throw Error(STROBE_UNSUPPORTED,
                    text("strict: ", chosen.engine->name(), " was asked for by name, and ", engine->name(), " is faster"));
    } else if (engine->computes(operation) && std::holds_alternative<Plan>(engine->plan(without_options(problem), execution, operation))) {
      throw Error(STROBE_UNSUPPORTED, text("strict: ", chosen.engine->name(), " would run, for the faster ", engine->name(),
                                           " refuses: ", std::get<std::string>(answer)));
    }
  }
  return {chosen.engine, std::get<Plan>(chosen.answer)};
}

} // namespace strobe
