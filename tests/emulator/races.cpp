#include "races.h"

#include <algorithm>

#include "emulator.h"

namespace strobe::emulator {

void Clock::raise(uint32_t party, uint32_t step) {
  if (party >= steps_.size()) steps_.resize(party + 1);
  steps_[party] = std::max(steps_[party], step);
}
void Clock::raise(const Clock &other) {
  for (uint32_t party = 0; party < other.steps_.size(); party++) raise(party, other.steps_[party]);
}

Races::Races(uint32_t warps, size_t bytes)
    : count_(2 * warps), parties_(count_), writes_((bytes + 3) / 4), reads_(writes_.size() * count_) {
  for (uint32_t p = 0; p < count_; p++) parties_[p].done.raise(p, 1);
}

void Races::access(uint32_t warp, uint32_t lane, uint32_t at, size_t bytes, Access access, uint32_t line) {
  const bool copies = access == Access::kAsyncWrite, writes = copies || access == Access::kWrite;
  const uint32_t party = copies ? copier_ : Races::party(warp, lane);
  const Knowledge &known = copies ? copy_ : parties_[party];
  for (size_t word = at / 4; word < (at + bytes + 3) / 4; word++) {
    check(known, party, word, access, line);
    Read *reads = &reads_[word * count_];
    if (access == Access::kAtomic) {
      if (atomics_.empty()) atomics_.resize(reads_.size());
      atomics_[word * count_ + party] = {known.done[party], line};
      continue;
    }
    if (!writes) {
      reads[party] = {known.done[party], line};
      continue;
    }
    writes_[word] = {party, known.done[party], line, copies};
    std::fill_n(reads, count_, Read{});
    if (!atomics_.empty()) std::fill_n(&atomics_[word * count_], count_, Read{});
  }
}

void Races::check(const Knowledge &known, uint32_t party, size_t word, Access access, uint32_t line) const {
  const bool reads = access == Access::kRead || access == Access::kAsyncRead;
  const Write &write = writes_[word];
  const auto fail = [&](uint32_t other, const char *did, uint32_t other_line, const char *lacks) {
    throw Fault("race: " + name(party) + (reads ? " reads" : " writes") + " shared memory (word " + std::to_string(word) +
                " of it, PTX line " + std::to_string(line) + ") that " + name(other) + did + " (PTX line " + std::to_string(other_line) +
                "), and " + lacks);
  };
  if (write.party != party && write.step > known.done[write.party]) fail(write.party, " wrote", write.line, "nothing orders them");
  if ((access == Access::kAsyncRead || access == Access::kAsyncWrite) && !write.async && write.step > known.fenced[write.party])
    fail(write.party, " wrote", write.line, "no fence.proxy.async is between");
  if (!atomics_.empty() && access != Access::kAtomic)
    for (uint32_t p = 0; p < count_; p++) {
      const Read &atomic = atomics_[word * count_ + p];
      if (p != party && atomic.step > known.done[p]) fail(p, " changed", atomic.line, "nothing orders them");
    }
  if (reads) return;
  for (uint32_t p = 0; p < count_; p++) {
    const Read &read = reads_[word * count_ + p];
    if (p != party && read.step > known.done[p]) fail(p, " read", read.line, "nothing orders them");
  }
}

std::string Races::name(uint32_t party) const {
  return party < count_ ? (party % 2 ? "warp " : "lane 0 of warp ") + std::to_string(party / 2) : "a copy";
}

void Races::fence(uint32_t warp, uint32_t lanes) {
  of(warp, lanes, [&](uint32_t party) {
    Knowledge &k = parties_[party];
    k.fenced.raise(k.done);
    k.done.raise(party, k.done[party] + 1);
  });
}

void Races::meet(uint32_t warp) {
  Knowledge &first = parties_[party(warp, 0)], &others = parties_[party(warp, 1)];
  first.raise(others), others = first;
  first.done.raise(party(warp, 0), first.done[party(warp, 0)] + 1);
  others.done.raise(party(warp, 1), others.done[party(warp, 1)] + 1);
}

void Races::arrive(uint32_t warp, uint32_t lanes, uint32_t barrier) {
  of(warp, lanes, [&](uint32_t party) {
    Knowledge &k = parties_[party];
    barriers_[barrier].coming.raise(k);
    k.done.raise(party, k.done[party] + 1);
  });
}
void Races::complete(uint32_t barrier) {
  Barrier &b = barriers_[barrier];
  b.completed.raise(b.coming), b.coming = {};
}
void Races::wait(uint32_t warp, uint32_t lanes, uint32_t barrier) {
  of(warp, lanes, [&](uint32_t party) { parties_[party].raise(barriers_[barrier].completed); });
}

void Races::perform(const Knowledge &begun, uint32_t barrier) {
  copier_ = copiers_.try_emplace(barrier, count_ + uint32_t(copiers_.size())).first->second;
  copy_ = begun, copy_barrier_ = barrier;
  copy_.done.raise(copier_, ++copies_);
}
void Races::end_copy() { barriers_[copy_barrier_].coming.raise(copy_); }

} // namespace strobe::emulator
