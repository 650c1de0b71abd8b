#include "attention/text.h"
#include "cuda/families/families.h"

namespace strobe::cuda {
namespace {

// Of the engines that take the problem on a device, the one with the least predicted time.
struct Fastest {
  const CudaEngine *engine = nullptr;
  Program program;
  std::string reasons; // of the others

  Fastest(const Problem &p, Direction direction, const Device &device, const CudaEngine *only = nullptr) {
    for (const Engine *candidate : cuda_engines()) {
      const CudaEngine &engine = static_cast<const CudaEngine &>(*candidate);
      if (only ? only != &engine : p.engine.empty() ? engine.only_by_name() : p.engine != engine.name()) continue;
      Scratch scratch;
      CudaEngine::Made made = engine.program_for(p, direction, device, scratch);
      if (Program *made_program = std::get_if<Program>(&made)) {
        if (this->engine && made_program->predicted_seconds >= program.predicted_seconds) continue;
        this->engine = &engine, program = std::move(*made_program);
      } else {
        reasons += text("\n", engine.name(), ": ", std::get<std::string>(made));
      }
    }
  }
};

// What would run.
Program program(const Problem &p, Direction direction, int cc) {
  const Device device = described(cc);
  Fastest fastest(p, direction, device);
  if (!fastest.engine) throw Error(STROBE_UNSUPPORTED, "no engine takes this problem:" + fastest.reasons);
  if (follows_forward(p, direction))
    if (const CudaEngine *same = Fastest(p, Direction::forward, device).engine; same && same != fastest.engine)
      if (Fastest followed(p, direction, device, same); followed.engine) fastest = std::move(followed);
  return std::move(fastest.program);
}

} // namespace

std::string kernels(const Problem &p, Direction direction, int cc) {
  std::string report;
  for (const Step &step : program(p, direction, cc).steps)
    if (const Launch *l = std::get_if<Launch>(&step))
      report += text(is_kept(*l->source, l->config, cc) ? "cached " : "missing ", kernel_name(*l->source, l->config), "\n");
  return report;
}

std::string prewarm(const Problem &p, Direction direction, int cc) {
  std::string report;
  for (const Step &step : program(p, direction, cc).steps)
    if (const Launch *l = std::get_if<Launch>(&step)) {
      const Build built = build(*l->source, l->config, cc);
      const int serialized = built.log.find("instructions are serialized") != built.log.npos;
      report += text(built.compiled ? "compiled " : "cached ", built.registers, " ", built.spill_bytes, " ", serialized, " ",
                     kernel_name(*l->source, l->config), "\n");
    }
  return report;
}

} // namespace strobe::cuda
