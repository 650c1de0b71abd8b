#include "cuda/program/engine.h"

#include "attention/contents.h"
#include "attention/text.h"
#include "cuda/compile/cache.h"
#include "cuda/driver/driver.h"
#include "cuda/driver/stream.h"
#include "cuda/program/rows.h"
#include "cuda/program/tuning.h"

namespace strobe::cuda {
namespace {

constexpr int64_t kMostPositions = int64_t{1} << 30; // of one sequence: kernels count them in 32 bits
constexpr int64_t kMostCtas = (int64_t{1} << 31) - 1;

std::vector<int32_t> fetched(const int32_t *ints, int64_t count, CUstream stream) {
  std::vector<int32_t> host(static_cast<size_t>(count));
  read(host.data(), ints, host.size() * sizeof(int32_t), stream);
  return host;
}

} // namespace

std::string CudaEngine::missing() const { return devices_missing(); }

CudaEngine::Made CudaEngine::program_for(const Problem &p, Direction direction, const Device &device, Scratch &scratch) const {
  if (p.seqlen_q > kMostPositions || p.seqlen_k > kMostPositions) return text("a sequence is longer than 2^30 = ", kMostPositions);
  if (p.batch > kMostCtas || p.heads > kMostCtas) return text("more than ", kMostCtas, " sequences or heads");
  if (p.blocks.present && direction == Direction::backward && !p.blocks.transposed)
    return "the backward of a block-sparse mask wants its transpose, block_rows_t and block_cols_t";
  Made made = "";
  if (const TunedTile *tile = tuned(p, direction, device)) {
    Problem wished = p;
    wished.tile_q = tile->q, wished.tile_k = tile->k;
    made = program(wished, direction, device, scratch);
    if (Program *program = std::get_if<Program>(&made)) program->notes.push_back("the tile that `strobe tune` measured to be the fastest");
  } else {
    made = program(p, direction, device, scratch);
  }
  if (Program *program = std::get_if<Program>(&made)) {
    if (p.varlen) program->steps.push_back(padding(p, direction));
    for (const Step &step : program->steps)
      if (const Launch *launch = std::get_if<Launch>(&step); launch && launch->grid > kMostCtas)
        return text(launch->grid, " thread blocks; a launch takes ", kMostCtas, p.varlen ? ": see max_seqlen_q and max_seqlen_k" : "");
  }
  return made;
}

const TunedTile *CudaEngine::tuned(const Problem &p, Direction direction, const Device &device) const {
  const Tuning &table = tuning(device);
  if (table.empty() || p.tile_q || p.tile_k) return nullptr;
  const std::optional<TuningKey> key = tuning_key(name(), direction, p);
  return key ? table.find(*key) : nullptr;
}

Answer CudaEngine::plan(const Problem &p, const Execution &, Direction direction) const {
  Scratch scratch;
  const Device &on = device(p.device_index);
  Made made = program_for(p, direction, on, scratch);
  if (std::string *reason = std::get_if<std::string>(&made)) return std::move(*reason);
  Program &program = std::get<Program>(made);
  Plan plan;
  plan.engine = name();
  plan.kernel = std::move(program.kernel);
  plan.tile_q = program.tile_q;
  plan.tile_k = program.tile_k;
  plan.workspace_bytes = scratch.bytes();
  plan.predicted_seconds = program.predicted_seconds;
  plan.notes = std::move(program.notes);
  if (const std::string &ignored = tuning(on).ignored(); !ignored.empty()) plan.notes.push_back(ignored);
  for (const std::string &why : refused_folders()) plan.notes.push_back(text("kernel cache not used: ", why));
  return plan;
}

Workspace CudaEngine::allocate(const Problem &p, const Execution &execution, uint64_t bytes) const {
  const Device &on = device(p.device_index);
  DeviceGuard guard(on);
  const CUstream stream = static_cast<CUstream>(execution.stream);
  return Workspace(cuda::allocate(bytes, stream), [&on, stream](void *memory) {
    DeviceGuard guard(on);
    cuda::free(memory, stream);
  });
}

void CudaEngine::run(const Problem &p, const Execution &execution, Direction direction, const Plan &, void *workspace) const {
  const Device &on = device(p.device_index);
  Scratch scratch(workspace);
  DeviceGuard guard(on); // the driver encodes tensor maps for a context
  const Made made = program_for(p, direction, on, scratch);
  const CUstream stream = static_cast<CUstream>(execution.stream);
  if (p.check && capturing(stream))
    throw Error(STROBE_INVALID_ARGUMENT, "check: 1 while the stream is captured; accepted is 0, for it waits for the stream");
  if (p.check) check_contents(p, [stream](const int32_t *ints, int64_t count) { return fetched(ints, count, stream); });
  const Program &todo = std::get<Program>(made);
  bool early = false; // what this thread put on the stream before is a kernel of this program
  for (const Step &step : todo.steps) {
    if (const Zero *zero = std::get_if<Zero>(&step)) {
      fill(zero->begin, 0, zero->bytes, stream);
      early = false;
    } else if (const Launch &l = std::get<Launch>(step); l.grid) {
      launch(load(*l.source, l.config, on), {.x = l.grid}, l.threads, l.shared_bytes, stream, l.arguments.data(), l.arguments.size(),
             early);
      early = todo.overlap && on.cc >= 90;
    }
  }
}

} // namespace strobe::cuda
