#include "cuda/program/prewarm.h"

#include "attention/text.h"
#include "cuda/program/engine.h"

namespace strobe::cuda {
namespace {

// The plan with the ordinary choice of engine and tile, for a GPU of this compute capability.
Plan plan(const Problem &p, Operation operation, int cc) {
  const Device device = described(cc);
  const auto may_run = [&p](const Engine &engine) {
    return p.wishes.engine.empty() ? !engine.only_by_name() : p.wishes.engine == engine.name();
  };
  Choice choice = choose(p, operation, [&](const Engine &engine, const Problem &p, Operation operation) -> Answer {
    return may_run(engine) ? static_cast<const CudaEngine &>(engine).plan_on(device, p, operation) : "not asked";
  });
  if (choice.chosen >= 0) return std::get<Plan>(std::move(choice.rows[choice.chosen].answer));
  std::string reasons;
  for (const auto &[engine, answer] : choice.rows)
    if (engine->device_type() == STROBE_CUDA && may_run(*engine))
      reasons += text("\n", engine->name(), ": ", std::get<std::string>(answer));
  throw Error(STROBE_UNSUPPORTED, "no engine takes this problem:" + reasons);
}

// One line per launch.
template <class F> std::string lines(const Plan &plan, F line) {
  std::string all;
  for (const Step &step : program_of(plan).steps)
    if (const Launch *l = std::get_if<Launch>(&step)) all += line(*l, kernel_name(*l->source, l->config)) + "\n";
  return all;
}

} // namespace

std::string kernels(const Problem &p, Operation operation, int cc) {
  return lines(plan(p, operation, cc), [cc](const Launch &l, const std::string &name) {
    return text(is_kept(*l.source, l.config, cc, l.functions) ? "cached " : "missing ", name);
  });
}

std::string prewarm(const Problem &p, Operation operation, int cc) {
  return lines(plan(p, operation, cc), [cc](const Launch &l, const std::string &name) {
    const Build built = build(*l.source, l.config, cc, From::anywhere, l.functions);
    const int serialized = built.log.find("instructions are serialized") != built.log.npos;
    return text(built.compiled ? "compiled " : "cached ", built.registers, " ", built.spill_bytes, " ", serialized, " ", name);
  });
}

} // namespace strobe::cuda
