// Barriers in shared memory. Their state lies at the program's address, so that an overwritten barrier is noticed.
#include <cstring>

#include "async.h"
#include "tile.h"

namespace strobe::emulator {
namespace {

struct State {
  static constexpr uint64_t kMark = 2, kMost = (1 << 20) - 1;
  uint64_t parity : 1, mark : 2;        // parity: the parity of the current phase
  uint64_t expected : 20, pending : 20; // numbers of arrivals
  int64_t bytes : 21;                   // bytes still to come; negative if bytes come before they are expected
};
static_assert(sizeof(State) == 8);

class Barrier {
public:
  Barrier(const Warp &warp, uint64_t address)
      : warp_(warp), at_(warp.shared(address, sizeof(State), 8, Access::kSynchronize, 0)), address_(address) {
    std::memcpy(&state_, at_, sizeof state_);
    if (state_.mark != State::kMark || state_.expected == 0) refuse("is not initialised, or overwritten");
  }
  static void init(const Warp &warp, uint64_t address, uint64_t arrivals) {
    if (arrivals == 0 || arrivals > State::kMost) throw Fault("mbarrier.init: " + std::to_string(arrivals) + " arrivals");
    const State fresh = {.parity = 0, .mark = State::kMark, .expected = arrivals, .pending = arrivals, .bytes = 0};
    std::memcpy(warp.shared(address, sizeof fresh, 8, Access::kSynchronize, 0), &fresh, sizeof fresh);
  }

  void arrive(uint32_t lane) {
    if (state_.pending == 0) refuse("gets more arrivals than a phase takes");
    state_.pending--;
    if (warp_.block.races) warp_.block.races->arrive(warp_.index, 1u << lane, uint32_t(address_));
    update();
  }
  void expect(int64_t bytes) {
    const int64_t sum = state_.bytes + bytes;
    if (sum < -static_cast<int64_t>(State::kMost) || sum > static_cast<int64_t>(State::kMost)) refuse("counts too many bytes");
    state_.bytes = sum;
    update();
  }
  bool completed(uint64_t parity) const { return state_.parity != (parity & 1); }

private:
  const Warp &warp_;
  std::byte *at_;
  uint64_t address_;
  State state_;

  void update() {
    if (state_.pending == 0 && state_.bytes == 0) {
      state_.parity ^= 1, state_.pending = state_.expected;
      if (warp_.block.races) warp_.block.races->complete(uint32_t(address_));
    }
    std::memcpy(at_, &state_, sizeof state_);
    warp_.block.grid.changes++;
  }
  [[noreturn]] void refuse(const char *what) const { throw Fault("the mbarrier at " + std::to_string(address_) + " " + what); }
};

Tile init(const Operand &barrier, const Operand &arrivals) {
  return [=](Warp &warp, uint32_t lanes) {
    for_each_lane(
        lanes, [&](uint32_t lane) { Barrier::init(warp, warp.value(barrier, lane), static_cast<uint32_t>(warp.value(arrivals, lane))); });
  };
}
Tile arrive(const Operand &barrier) {
  return [=](Warp &warp, uint32_t lanes) {
    for_each_lane(lanes, [&](uint32_t lane) { Barrier(warp, warp.value(barrier, lane)).arrive(lane); });
  };
}
Tile arrive_expecting(const Operand &barrier, const Operand &bytes) {
  return [=](Warp &warp, uint32_t lanes) {
    for_each_lane(lanes, [&](uint32_t lane) {
      const uint64_t address = warp.value(barrier, lane);
      Barrier(warp, address).expect(static_cast<uint32_t>(warp.value(bytes, lane)));
      Barrier(warp, address).arrive(lane);
    });
  };
}

void hurry(Warp &warp, uint32_t barrier) {
  std::vector<Transfer> mine, &all = warp.block.async->transfers;
  for (const Transfer &t : all)
    if (t.barrier == barrier) mine.push_back(t);
  std::erase_if(all, [&](const Transfer &t) { return t.barrier == barrier; });
  for (const Transfer &t : mine) t.perform(warp);
}

Tile try_wait(const Operand &done, const Operand &barrier, const Operand &parity) {
  return [=](Warp &warp, uint32_t lanes) {
    uint32_t completed = 0;
    for_each_lane(lanes, [&](uint32_t lane) {
      const uint64_t address = warp.value(barrier, lane), wanted = warp.value(parity, lane);
      if (!Barrier(warp, address).completed(wanted)) hurry(warp, static_cast<uint32_t>(address));
      if (!Barrier(warp, address).completed(wanted)) return;
      completed |= 1u << lane;
      if (warp.block.races) warp.block.races->wait(warp.index, 1u << lane, uint32_t(address));
    });
    uint32_t &predicate = *warp.words(done);
    predicate = (predicate & ~lanes) | completed;
    warp.waits = completed != lanes;
  };
}

} // namespace

void complete_bytes(const Warp &warp, uint32_t barrier, uint32_t bytes) {
  if (warp.block.races) warp.block.races->end_copy();
  Barrier(warp, barrier).expect(-static_cast<int64_t>(bytes));
}

void barriers_end(Block &block) {
  if (!block.async->transfers.empty()) throw Fault("the block ends while a copy into its shared memory is under way");
}

Tile decode_mbarrier(std::string_view opcode, const Operands &operands) {
  if (!opcode.starts_with("mbarrier.")) return {};
  if (opcode == "mbarrier.init.shared::cta.b64") return init(operands[0], operands[1]);
  if (opcode == "mbarrier.try_wait.parity.shared::cta.b64" || opcode == "mbarrier.test_wait.parity.shared::cta.b64")
    return try_wait(operands[0], operands[1], operands[2]);
  if (!operands.empty() && operands[0].kind == Operand::kSink) {
    if (opcode == "mbarrier.arrive.shared::cta.b64" && operands.size() == 2) return arrive(operands[1]);
    if (opcode == "mbarrier.arrive.expect_tx.shared::cta.b64") return arrive_expecting(operands[1], operands[2]);
  }
  unsupported(opcode);
}

} // namespace strobe::emulator
