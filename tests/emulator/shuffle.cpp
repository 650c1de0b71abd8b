// shfl, vote, redux, elect, bar.warp.sync: exchange among the lanes of a warp.
#include "opcodes.h"

namespace strobe::emulator {
namespace {

enum Mode { kButterfly, kIndex, kUp, kDown };

template <Mode mode> void shuffle(Warp &w, const Instruction &i, uint32_t lanes) {
  uint32_t before[kLanes], in_range = 0;
  std::memcpy(before, w.lanes<uint32_t>(i.a[0]), sizeof(before));
  uint32_t values[kLanes];
  each(lanes, [&](uint32_t lane) {
    const uint32_t b = w.lanes<uint32_t>(i.a[1])[lane] & 31, c = w.lanes<uint32_t>(i.a[2])[lane];
    const uint32_t clamp = c & 31, segment = c >> 8 & 31;
    const uint32_t least = lane & segment, most = least | (clamp & ~segment);
    const int from = mode == kButterfly ? lane ^ b : mode == kIndex ? least | (b & ~segment) : mode == kUp ? int(lane) - int(b) : lane + b;
    const bool within = mode == kUp ? from >= int(most) : from <= int(most);
    const uint32_t source = within ? from : lane;
    need(lanes >> source & 1, "it reads a lane that does not take part");
    values[lane] = before[source], in_range |= uint32_t(within) << lane;
  });
  each(lanes, [&](uint32_t lane) { w.lanes<uint32_t>(i.d)[lane] = values[lane]; });
  if (i.d2 != kNoSlot) write_mask(w, i.d2, lanes, in_range);
}

template <bool all> void vote(Warp &w, const Instruction &i, uint32_t lanes) {
  const uint32_t holds = *w.lanes<uint32_t>(i.a[0]) & lanes;
  write_mask(w, i.d, lanes, (all ? holds == lanes : holds != 0) ? kAllLanes : 0);
}
void ballot(Warp &w, const Instruction &i, uint32_t lanes) {
  const uint32_t holds = *w.lanes<uint32_t>(i.a[0]) & lanes;
  each(lanes, [&](uint32_t lane) { w.lanes<uint32_t>(i.d)[lane] = holds; });
}
void greatest(Warp &w, const Instruction &i, uint32_t lanes) {
  uint32_t most = 0;
  each(lanes, [&](uint32_t lane) { most = std::max(most, w.lanes<uint32_t>(i.a[0])[lane]); });
  each(lanes, [&](uint32_t lane) { w.lanes<uint32_t>(i.d)[lane] = most; });
}
void elect(Warp &w, const Instruction &i, uint32_t lanes) {
  const uint32_t first = uint32_t(std::countr_zero(lanes));
  if (i.d != kNoSlot) each(lanes, [&](uint32_t lane) { w.lanes<uint32_t>(i.d)[lane] = first; });
  if (i.d2 != kNoSlot) write_mask(w, i.d2, lanes, 1u << first);
}

} // namespace

// The last operand is the mask of the lanes that take part.
bool decode_warp(Kernel &k, Instruction &i, const std::string &opcode, const std::vector<Operand> &operands) {
  static const std::unordered_map<std::string, Opcode> known = {{"shfl.sync.bfly.b32", {shuffle<kButterfly>, 32, {32, 32, 32}}},
                                                                {"shfl.sync.idx.b32", {shuffle<kIndex>, 32, {32, 32, 32}}},
                                                                {"shfl.sync.up.b32", {shuffle<kUp>, 32, {32, 32, 32}}},
                                                                {"shfl.sync.down.b32", {shuffle<kDown>, 32, {32, 32, 32}}},
                                                                {"vote.sync.any.pred", {vote<false>, 1, {1}}},
                                                                {"vote.sync.all.pred", {vote<true>, 1, {1}}},
                                                                {"vote.sync.ballot.b32", {ballot, 32, {1}}},
                                                                {"redux.sync.max.u32", {greatest, 32, {32}}},
                                                                {"elect.sync", {elect, 32, {}}},
                                                                {"bar.warp.sync", {nothing, 0, {}}}};
  const auto found = known.find(opcode);
  if (found == known.end()) return false;
  const Opcode &o = found->second;
  size_t n = 0;
  if (o.d) {
    need(!operands.empty(), "wants another number of operands");
    const bool two = operands[0].kind == Operand::kVector; // value | predicate: whether the lane is in range
    i.d = destination(two ? operands[0].parts[0] : operands[0], o.d);
    if (two) i.d2 = destination(operands[0].parts[1], 1);
    n = 1;
  }
  for (int a = 0; a < 4 && o.a[a]; a++, n++) {
    need(n < operands.size(), "wants another number of operands");
    i.a[a] = source(k, operands[n], o.a[a]);
  }
  need(n + 1 == operands.size(), "wants another number of operands");
  i.mask = source(k, operands[n], 32), i.kind = Instruction::kMasked, i.execute = o.execute;
  return true;
}

} // namespace strobe::emulator
