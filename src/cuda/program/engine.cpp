#include "cuda/program/engine.h"

#include "attention/contents.h"
#include "attention/refusal.h"
#include "attention/text.h"
#include "cuda/compile/cache.h"
#include "cuda/driver/driver.h"
#include "cuda/driver/stream.h"
#include "cuda/program/ahead.h"
#include "cuda/program/arguments.h"
#include "cuda/program/captured.h"
#include "cuda/program/lists.h"
#include "cuda/program/part.h"
#include "cuda/program/passes.h"
#include "cuda/program/queries.h"
#include "cuda/program/tuning.h"

namespace strobe::cuda {
namespace {

constexpr int64_t kMostPositions = int64_t{1} << 30; // the most positions of a sequence: kernels count them in 32 bits
constexpr int64_t kMostCtas = (int64_t{1} << 31) - 1;
// Functions of more instructions for a pair go to an engine that does not unroll them, unless another one is asked for. With 64 reads at
// d 64 cuda-sm90's forward compiles for a minute and spills 6 KB a thread; cuda-simt's takes 7 s.
constexpr int32_t kMostUnrolled = 100;
constexpr double kUnrolled = 1000;

std::vector<int32_t> fetched(const int32_t *ints, int64_t count, CUstream stream) {
  std::vector<int32_t> host(static_cast<size_t>(count));
  read(host.data(), ints, host.size() * sizeof(int32_t), stream);
  return host;
}

// Gives the source of the caller's functions to the launches that call them.
void give_functions(Program &program, const Problem &p) {
  Functions sources[2];
  for (Step &step : program.steps)
    if (Launch *launch = std::get_if<Launch>(&step); launch && launch->calls_functions) {
      Functions &source = sources[launch->of_captured];
      if (!source) source = std::make_shared<const std::string>(launch->of_captured ? gradient_functions_source(p) : functions_source(p));
      launch->functions = source;
    }
}

// Loads the kernels that a run is about to launch.
void load_all(const Program &program, const Device &on) {
  std::vector<KernelName> names;
  for (const Step &step : program.steps)
    if (const Launch *l = std::get_if<Launch>(&step); l && l->grid && !find_loaded(*l->source, l->config, on, l->functions))
      names.push_back({l->source, l->config, l->functions});
  load_together(names, on);
}

} // namespace

std::string CudaEngine::missing() const { return devices_missing(); }

Answer CudaEngine::plan_on(const Device &device, const Problem &call, Operation operation) const {
  if (call.seqlen_q > kMostPositions || call.seqlen_k > kMostPositions) return text("a sequence is longer than 2^30 = ", kMostPositions);
  if (call.batch > kMostCtas || call.heads > kMostCtas) return text("more than ", kMostCtas, " sequences or heads");
  if (call.part.most_q > kMostPositions || call.part.most_k > kMostPositions)
    return text("a whole sequence of part is longer than 2^30 = ", kMostPositions);
  if (call.part && !computes_parts()) return "computes no parts of a larger problem";
  if (call.page_size && !reads_pages()) return "k and v in pages: it reads one tensor each";
  if (call.quantised() && !reads_quantised()) return text("k and v in ", strobe::name(call.quantised_as), ": it reads q's dtype");
  if (call.accumulate && !computes_parts()) return "no accumulate: it writes gradients, and adds to none";
  if (call.blocks.present && writes(operation, kGradients) && !call.blocks.transposed)
    return "the backward of a block-sparse mask wants its transpose, block_rows_t and block_cols_t";
  Problem p = marked(call);
  make_functions(p);
  const TunedTile *tile = tuned(p, operation, device);
  if (tile)
    p.wishes = {.engine = std::move(p.wishes.engine),
                .tile_q = tile->q,
                .tile_k = tile->k,
                .bundle = tile->bundle,
                .shares = tile->shares,
                .staged_store = tile->staged_store,
                .persistent = tile->persistent};
  Scratch scratch;
  const std::optional<Launch> lists = copy_lists(p, scratch);
  std::vector<Launch> first;
  if (p.part) first = part_table(p, scratch);
  if (std::optional<Launch> ahead = compute_ahead(p, scratch)) first.push_back(std::move(*ahead));
  const bool dequantises = p.quantised_queries() && !multiplies_eight_bits(p, device);
  if (dequantises) first.push_back(dequantise_queries(p, scratch));
  Made made = program(p, operation, device, scratch);
  if (std::string *reason = std::get_if<std::string>(&made)) return std::move(*reason);
  const auto program = std::make_shared<Program>(std::move(std::get<Program>(made)));
  program->predicted_seconds += ahead_seconds(p, device);
  if (dequantises) {
    program->predicted_seconds += dequantising_q_seconds(p, device);
    program->notes.push_back(text("q dequantised to ", strobe::name(p.dtype), " first"));
  }
  if (unrolls_functions() && function_instructions(p) > kMostUnrolled) program->predicted_seconds *= kUnrolled;
  if (tile) program->notes.push_back("the tile that `strobe tune` measured to be the fastest");
  if (p.varlen || (p.seqused_k && writes(operation, kGradients))) program->steps.push_back(padding(p, operation));
  if (p.auxiliary()) auxiliary(*program, p, device, scratch);
  for (std::string &note : ahead_in_words(p)) program->notes.push_back(std::move(note));
  program->steps.insert(program->steps.begin(), first.begin(), first.end());
  if (lists) {
    program->steps.insert(program->steps.begin(), *lists);
    program->copied = std::make_shared<Problem>(p);
    program->notes.push_back(text("lists with gaps, copied first: ", copied_lists(p)));
  }
  for (const Step &step : program->steps)
    if (const Launch *launch = std::get_if<Launch>(&step); launch && launch->grid > kMostCtas)
      return text(launch->grid, " thread blocks; a launch takes ", kMostCtas, p.varlen ? ": see max_seqlen_q and max_seqlen_k" : "");
  give_functions(*program, p);
  Plan plan;
  plan.engine = name();
  plan.kernel = std::move(program->kernel);
  plan.tile_q = program->tile_q;
  plan.tile_k = program->tile_k;
  plan.workspace_bytes = scratch.bytes();
  plan.predicted_seconds = program->predicted_seconds;
  plan.notes = std::move(program->notes);
  plan.program = program;
  return plan;
}

const Program &program_of(const Plan &plan) { return *static_cast<const Program *>(plan.program.get()); }

const TunedTile *CudaEngine::tuned(const Problem &p, Operation operation, const Device &device) const {
  const Tuning &table = tuning(device);
  if (table.empty() || p.wishes.tile_q || p.wishes.tile_k) return nullptr;
  const std::optional<TuningKey> key = tuning_key(name(), operation, p);
  return key ? table.find(*key) : nullptr;
}

double CudaEngine::least_seconds(const Problem &p, Operation operation) const {
  return least_seconds_on(device(p.device_index), p, operation);
}

Answer CudaEngine::plan(const Problem &p, const Execution &execution, Operation operation) const {
  const Device &whole = device(p.device_index);
  if (execution.reserved_sms >= whole.sms)
    refuse("execution.reserved_sms", Code::value, "{0}; accepted is 0 to {1}, one fewer than the GPU has", execution.reserved_sms,
           whole.sms - 1);
  Device on = whole;
  on.sms -= execution.reserved_sms;
  Answer answer = plan_on(on, p, operation);
  if (Plan *plan = std::get_if<Plan>(&answer)) {
    if (execution.reserved_sms)
      plan->notes.push_back(
          program_of(*plan).persistent
              ? text("reserved_sms: the main kernel leaves ", execution.reserved_sms, " SMs to others")
              : "reserved_sms: this kernel's blocks go to every SM that is free; work is shared out for those that are left");
    if (const std::string &ignored = tuning(on).ignored(); !ignored.empty()) plan->notes.push_back(ignored);
    for (const std::string &why : refused_folders()) plan->notes.push_back(text("kernel cache not used: ", why));
    for (const std::string &why : refused_code()) plan->notes.push_back(text("compiled here: ", why));
  }
  return answer;
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

void CudaEngine::run(const Problem &p, const Execution &execution, Operation, const Plan &plan, void *workspace) const {
  const Device &on = device(p.device_index);
  DeviceGuard guard(on); // the driver needs a context to encode tensor maps
  const CUstream stream = static_cast<CUstream>(execution.stream);
  if (p.check && capturing(stream))
    refuse("check", Code::excluded, "1 while the stream is captured; accepted is 0, for it waits for the stream");
  const Program &program = program_of(plan);
  const Addresses addresses(p, workspace);
  alignas(TensorMap) std::byte arguments[Launch::kMostArguments];
  const auto start = [&](const Launch &l, bool early) {
    if (!l.grid) return false;
    l.bind(addresses, arguments);
    const Kernel *kernel = find_loaded(*l.source, l.config, on, l.functions);
    if (!kernel) load_all(program, on), kernel = &load(*l.source, l.config, on, l.functions);
    launch(*kernel, {.x = l.grid}, l.threads, l.shared_bytes, stream, arguments, l.arguments.size(), early);
    return true;
  };
  auto step = program.steps.begin();
  if (program.copied) start(std::get<Launch>(*step++), false);
  if (p.check)
    check_contents(program.copied ? with_copies(p, *program.copied, addresses) : p,
                   [stream](const int32_t *ints, int64_t count) { return fetched(ints, count, stream); });
  // Whether this thread's last operation on the stream is a kernel of this program. The launch that copies lists does not count, because
  // some kernels read lists before they wait for the previous launch.
  bool early = false;
  for (; step != program.steps.end(); ++step) {
    if (const Zero *zero = std::get_if<Zero>(&*step)) {
      fill(addresses.of(zero->begin), 0, zero->bytes, stream);
      early = false;
    } else if (const Launch &launch = std::get<Launch>(*step); start(launch, early)) {
      early = program.overlap && on.cc >= 90 && !launch.finishes;
    }
  }
}

} // namespace strobe::cuda
