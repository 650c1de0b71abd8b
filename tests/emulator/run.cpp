// Runs a grid: some blocks at a time; the warps of a block in turn; and together those lanes of a warp that are at the same instruction.
#include <algorithm>
#include <deque>
#include <random>

#include "machine.h"
#include "opcodes.h"

namespace strobe::emulator {
namespace {

constexpr int kSlice = 2048; // how many instructions of a warp run before another warp does
// A deadlock is reported after kStillRounds rounds of all warps in which nothing but the clock has changed. A round is short if every warp
// waits.
constexpr uint32_t kStillRounds = 1 << 17, kBusyRound = 16, kRoundCycles = 1 << 16;

class Runner {
public:
  Runner(const Module &module, const Kernel &kernel, const Launch &launch, const Machine &machine)
      : module_(module), kernel_(kernel), launch_(launch), random_(machine.seed), grid_{.machine = machine} {
    grid_.argument_bytes = kernel.info.argument_bytes;
    grid_.arguments.resize(grid_.argument_bytes / sizeof(ArgumentLine) + 1);
    std::memcpy(grid_.arguments.data(), launch.arguments, grid_.argument_bytes);
    for (int axis = 0; axis < 3; axis++) grid_.blocks[axis] = launch.grid[axis], grid_.threads[axis] = launch.block[axis];
  }

  void run() {
    const uint64_t count = uint64_t(launch_.grid[0]) * launch_.grid[1] * launch_.grid[2];
    const uint64_t resident = std::min<uint64_t>(count, grid_.machine.multiprocessors * grid_.machine.blocks_per_multiprocessor);
    uint64_t begun = 0;
    for (; begun < resident; begun++) begin(blocks_.emplace_back(), begun);
    uint32_t still = 0;
    for (size_t ended = 0; ended < count;) {
      const uint64_t before = grid_.changes;
      bool busy = false;
      for (Resident &r : blocks_) {
        if (r.block->warps.empty()) continue;
        busy |= run_block(*r.block);
        if (std::any_of(r.block->warps.begin(), r.block->warps.end(), [](const RunningWarp &w) { return w.alive != 0; })) continue;
        ended++, grid_.changes++;
        if (begun < count)
          begin(r, begun++);
        else
          r.block->warps.clear();
      }
      grid_.clock += kRoundCycles;
      still = grid_.changes != before ? 0 : still + (busy ? kBusyRound : 1);
      if (still > kStillRounds) deadlock();
    }
  }

private:
  struct Free {
    void operator()(void *memory) const { std::free(memory); }
  };
  struct Resident {
    std::unique_ptr<std::byte, Free> memory; // shared memory, then the registers of each warp, then its local memory
    size_t warp_bytes = 0;
    std::unique_ptr<RunningBlock> block;
  };

  void begin(Resident &r, uint64_t n) {
    const uint32_t threads = launch_.block[0] * launch_.block[1] * launch_.block[2], warps = (threads + kLanes - 1) / kLanes;
    const size_t shared = kernel_.info.static_shared + launch_.dynamic_shared, registers = size_t(kernel_.slots) * kLanes * 4;
    const size_t warp_bytes = registers + size_t(kernel_.local_bytes) * kLanes;
    const size_t begin = (shared + kPage - 1) / kPage * kPage;
    if (!r.memory)
      r.memory.reset(static_cast<std::byte *>(std::aligned_alloc(kPage, (begin + warps * warp_bytes + kPage - 1) / kPage * kPage)));
    std::memset(r.memory.get(), 0xFF, begin + warps * warp_bytes); // reads of unwritten memory give NaN
    const std::array<uint32_t, 3> index = {uint32_t(n % launch_.grid[0]), uint32_t(n / launch_.grid[0] % launch_.grid[1]),
                                           uint32_t(n / launch_.grid[0] / launch_.grid[1])};
    r.block.reset(new RunningBlock{
        {grid_, {index[0], index[1], index[2]}, r.memory.get(), uint32_t(kSharedBegin + shared), make_block_async()}, {}, {}});
    RunningBlock &b = *r.block;
    if (grid_.machine.races) b.races = std::make_unique<Races>(warps, shared);
    for (uint32_t w = 0; w < warps; w++) {
      std::byte *at = r.memory.get() + begin + w * warp_bytes;
      const uint32_t lanes = std::min(threads - w * kLanes, kLanes);
      b.warps.push_back({{.block = b,
                          .index = w,
                          .registers = at,
                          .local = at + registers,
                          .local_bytes = kernel_.local_bytes,
                          .async = make_warp_async()},
                         lanes == kLanes ? kAllLanes : (1u << lanes) - 1,
                         {}});
      b.warps.back().paths = {{0, b.warps.back().alive}};
      for (const Constant &c : kernel_.constants) set(b.warps.back(), c);
    }
  }

  void set(const RunningWarp &w, const Constant &c) const {
    for (uint32_t lane = 0; lane < kLanes; lane++) {
      const uint32_t thread = w.index * kLanes + lane, *size = launch_.block;
      const uint32_t threads[3] = {thread % size[0], thread / size[0] % size[1], thread / size[0] / size[1]};
      const uint64_t value = c.of == Constant::kNumber    ? c.value
                             : c.of == Constant::kThread  ? threads[c.axis]
                             : c.of == Constant::kThreads ? size[c.axis]
                             : c.of == Constant::kBlock   ? w.block.index[c.axis]
                             : c.of == Constant::kBlocks  ? launch_.grid[c.axis]
                                                          : lane;
      if (c.bits == 64)
        w.lanes<uint64_t>(c.slot)[lane] = value;
      else if (c.bits == 16)
        w.lanes<uint16_t>(c.slot)[lane] = uint16_t(value);
      else
        w.lanes<uint32_t>(c.slot)[lane] = uint32_t(value);
    }
  }

  // Gives each warp of the block a time slice. Returns whether some warp did more than wait.
  bool run_block(RunningBlock &b) {
    bool busy = false;
    const size_t first = grid_.machine.seed ? random_() % b.warps.size() : 0;
    for (size_t n = 0; n < b.warps.size(); n++) {
      RunningWarp &w = b.warps[(first + n) % b.warps.size()];
      if (!w.alive || w.blocked) continue;
      w.waits = false;
      choose(w);
      try {
        run_slice(w, grid_.machine.seed ? 1 + int(random_() % kSlice) : kSlice);
      } catch (const Fault &fault) {
        throw Fault(where(w) + ": " + fault.what());
      }
      busy |= !w.waits;
      w.rotate = w.paths.size() > 1;
    }
    return busy;
  }

  // Chooses the path that is furthest behind; or the next path, if the current one's time slice is over.
  static void choose(RunningWarp &w) {
    const size_t count = w.paths.size();
    size_t best = count;
    for (size_t n = 1; n <= count; n++) {
      const size_t at = (w.at + n) % count;
      if (w.paths[at].stalled) continue;
      if (best == count || (!w.rotate && w.paths[at].pc < w.paths[best].pc)) best = at;
    }
    need(best < count, "the lanes of this warp wait for one another at different instructions");
    w.at = best;
  }

  // Lets lanes that have arrived at the same instruction continue together.
  static void merge(RunningWarp &w) {
    for (size_t n = 0; n < w.paths.size(); n++) {
      if (n == w.at || w.paths[n].pc != w.paths[w.at].pc) continue;
      w.paths[w.at].lanes |= w.paths[n].lanes, w.paths[w.at].stalled = false;
      w.paths.erase(w.paths.begin() + n);
      w.at -= n < w.at, w.rotate = false;
      n--;
    }
  }

  void run_slice(RunningWarp &w, int most) {
    for (int n = 0; n < most && !w.waits; n++) {
      step(w);
      if (!w.alive) return finish(w);
      if (w.paths.size() == 1) {
        w.at = 0;
        continue;
      }
      merge(w);
      if (!w.rotate || w.paths[w.at].stalled) w.rotate = false, choose(w);
    }
  }

  void step(RunningWarp &w) {
    Path &p = w.paths[w.at];
    const Instruction &i = kernel_.code[p.pc];
    uint32_t lanes = p.lanes;
    if (i.guarded) lanes &= i.guard_negated ? ~*w.lanes<uint32_t>(i.guard) : *w.lanes<uint32_t>(i.guard);
    grid_.clock++, grid_.line = i.line;
    switch (i.kind) {
    case Instruction::kBranch:
      if (lanes == p.lanes) {
        p.pc = i.target;
      } else {
        p.pc++;
        if (!lanes) break;
        p.lanes &= ~lanes;
        w.paths.push_back({i.target, lanes});
      }
      break;
    case Instruction::kEnd:
      end(w, lanes);
      break;
    case Instruction::kPlain:
      if (lanes) i.execute(w, i, lanes);
      p.pc++;
      break;
    default:
      converge(w, i, lanes);
    }
  }

  static void converge(RunningWarp &w, const Instruction &i, uint32_t lanes) {
    Path &p = w.paths[w.at];
    const uint32_t all = i.kind == Instruction::kAligned ? w.alive : w.alive & w.lanes<uint32_t>(i.mask)[__builtin_ctz(p.lanes)];
    if (all & ~p.lanes) {
      need(w.paths.size() > 1, "lanes of this warp that it waits for cannot come");
      p.stalled = true;
      return;
    }
    if (lanes) {
      need(!(all & ~lanes), "its guard leaves out lanes that it waits for");
      need(i.kind == Instruction::kAligned || !(lanes & ~all), "a lane executes it that its mask leaves out");
      if (w.block.races && lanes == w.alive) w.block.races->meet(w.index);
      i.execute(w, i, lanes);
    }
    p.pc++;
  }

  static void end(RunningWarp &w, uint32_t lanes) {
    Path &p = w.paths[w.at];
    w.alive &= ~lanes, p.lanes &= ~lanes, p.pc++;
    if (!p.lanes) w.paths.erase(w.paths.begin() + w.at), w.at = 0;
    for (Path &path : w.paths) path.stalled = false;
  }

  std::string where(const RunningWarp &w) const {
    const Path &p = w.paths[std::min(w.at, w.paths.size() - 1)];
    const uint32_t line = kernel_.code[p.pc - w.blocked].line, *block = w.block.index;
    char lanes[9];
    std::snprintf(lanes, sizeof(lanes), "%08x", p.lanes);
    return kernel_.name + ", PTX line " + std::to_string(line) + " (" + module_.lines[line - 1] + "), block " + std::to_string(block[0]) +
           " " + std::to_string(block[1]) + " " + std::to_string(block[2]) + ", warp " + std::to_string(w.index) + ", lanes " + lanes;
  }

  [[noreturn]] void deadlock() const {
    std::string what = "deadlock: nothing changes any more. Where the warps wait:";
    for (const Resident &r : blocks_)
      for (const RunningWarp &w : r.block->warps)
        if (w.alive) what += "\n  " + where(w);
    throw Fault(what);
  }

  const Module &module_;
  const Kernel &kernel_;
  const Launch &launch_;
  std::mt19937 random_;
  Grid grid_;
  std::deque<Resident> blocks_;
};

} // namespace

void run(const Module &module, const std::string &kernel, const Launch &launch, const Machine &machine) {
  kernel_info(module, kernel);
  std::fill(std::begin(mapped_pages), std::end(mapped_pages), 0);
  Runner(module, module.kernels.at(kernel), launch, machine).run();
}

} // namespace strobe::emulator
