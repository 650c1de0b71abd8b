// bar.sync, bar.arrive and bar.red: warps of a block wait for one another.
#include "machine.h"
#include "opcodes.h"

namespace strobe::emulator {
namespace {

uint32_t same_in_all(const Warp &w, uint32_t slot, uint32_t lanes) {
  const uint32_t *values = w.lanes<uint32_t>(slot), value = values[__builtin_ctz(lanes)];
  each(lanes, [&](uint32_t lane) { need(values[lane] == value, "the lanes of a warp name different barriers or counts"); });
  return value;
}

enum Result { kNone, kAny, kAll, kCount };
void write_result(Result result, const RunningWarp &w, const Instruction &i, const Barrier &b) {
  if (result == kCount) each(w.alive, [&](uint32_t lane) { w.lanes<uint32_t>(i.d)[lane] = b.holds; });
  if (result == kAny || result == kAll) write_mask(w, i.d, w.alive, (result == kAny ? b.holds > 0 : b.holds == b.threads) ? kAllLanes : 0);
}

template <Result result, bool waits> void come(Warp &warp, const Instruction &i, uint32_t lanes) {
  auto &w = static_cast<RunningWarp &>(warp);
  auto &block = static_cast<RunningBlock &>(w.block);
  const uint32_t id = same_in_all(w, i.a[0], lanes), whole = uint32_t(block.warps.size()) * kLanes;
  const uint32_t expected = i.a[1] == kNoSlot ? whole : same_in_all(w, i.a[1], lanes);
  need(id < block.barriers.size(), "there are sixteen barriers");
  need(expected > 0 && expected % kLanes == 0 && expected <= whole, "a barrier's count is one of whole warps of the block");
  Barrier &b = block.barriers[id];
  need(b.arrived == 0 || b.expected == expected, "those who came to this barrier before gave another count");
  b.expected = expected, b.arrived += kLanes, b.threads += __builtin_popcount(lanes);
  if (result != kNone) b.holds += __builtin_popcount(lanes & *w.lanes<uint32_t>(i.a[2]));
  if (block.races) block.races->arrive(w.index, lanes, id);
  if (waits) b.waiting.emplace_back(&w, &i), w.blocked = w.waits = true;
  if (b.arrived < b.expected) return;
  if (block.races) block.races->complete(id);
  for (const auto &[other, instruction] : b.waiting) {
    if (block.races) block.races->wait(other->index, other->alive, id);
    other->blocked = other->waits = false;
    write_result(result, *other, *instruction, b);
  }
  b = {};
  block.grid.changes++;
}

} // namespace

bool decode_barrier(Kernel &k, Instruction &i, const std::string &opcode, const std::vector<Operand> &operands) {
  struct Form {
    Execute execute;
    uint8_t d; // bits of the result; 0: no result and no predicate
    bool counted;
  };
  static const std::unordered_map<std::string, Form> forms = {{"bar.sync", {come<kNone, true>, 0, false}},
                                                              {"bar.arrive", {come<kNone, false>, 0, true}},
                                                              {"bar.red.or.pred", {come<kAny, true>, 1, false}},
                                                              {"bar.red.and.pred", {come<kAll, true>, 1, false}},
                                                              {"bar.red.popc.u32", {come<kCount, true>, 32, false}}};
  if (opcode == "setmaxnreg.inc.sync.aligned.u32" || opcode == "setmaxnreg.dec.sync.aligned.u32")
    return i.kind = Instruction::kAligned, i.execute = nothing, true;
  const auto found = forms.find(opcode);
  if (found == forms.end()) return false;
  const Form &form = found->second;
  const size_t others = form.d ? 2 : 0, given = operands.size();
  const bool counted = given == others + 2;
  need(counted || (given == others + 1 && !form.counted), "wants another number of operands");
  if (form.d) i.d = destination(operands[0], form.d), i.a[2] = source(k, operands.back(), 1);
  i.a[0] = source(k, operands[form.d != 0], 32);
  if (counted) i.a[1] = source(k, operands[1 + (form.d != 0)], 32);
  i.kind = Instruction::kAligned, i.execute = form.execute;
  return true;
}

} // namespace strobe::emulator
