#include "cuda/program/prewarm.h"

#include "attention/text.h"
#include "cuda/program/engine.h"

namespace strobe::cuda {

std::string prewarm(const Problem &p, Direction direction, int cc) {
  const Device device = described(cc);
  auto may_run = [&p](const Engine &engine) { return p.engine.empty() ? !engine.only_by_name() : p.engine == engine.name(); };
  const Choice choice = choose(p, direction, [&](const Engine &engine, Direction direction) -> Answer {
    return may_run(engine) ? static_cast<const CudaEngine &>(engine).plan_on(device, p, direction) : "not asked";
  });
  if (choice.chosen < 0) {
    std::string reasons;
    for (const auto &[engine, answer] : choice.rows)
      if (engine->device_type() == STROBE_CUDA && may_run(*engine))
        reasons += text("\n", engine->name(), ": ", std::get<std::string>(answer));
    throw Error(STROBE_UNSUPPORTED, "no engine takes this problem:" + reasons);
  }
  std::string report;
  for (const Step &step : program_of(std::get<Plan>(choice.rows[choice.chosen].answer)).steps)
    if (const Launch *l = std::get_if<Launch>(&step)) {
      const Build built = build(*l->source, l->config, cc);
      const int serialized = built.log.find("instructions are serialized") != built.log.npos;
      report += text(built.compiled ? "compiled " : "cached ", built.registers, " ", built.spill_bytes, " ", serialized, " ",
                     kernel_name(*l->source, l->config), "\n");
    }
  return report;
}

} // namespace strobe::cuda
