// Races in a block's shared memory: two accesses, one of them a write and not both atomic, that nothing orders; and accesses of the copy
// engine or wgmma to words that threads have written, without a proxy fence in between. In a warp, lane 0, which usually arrives and waits
// for all lanes, is one party; all other lanes together are another. Where all lanes meet (.sync, .aligned), each knows the earlier
// accesses of the others.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace strobe::emulator {

enum class Access : uint8_t { kRead, kWrite, kAsyncRead, kAsyncWrite, kAtomic, kSynchronize };

// How many steps of each party are known. A party is lane 0 of a warp, the other lanes of a warp, or the copies that complete on one
// barrier.
class Clock {
public:
  uint32_t operator[](uint32_t party) const { return party < steps_.size() ? steps_[party] : 0; }
  void raise(uint32_t party, uint32_t step);
  void raise(const Clock &);

private:
  std::vector<uint32_t> steps_;
};
struct Knowledge {
  Clock done;   // known earlier steps
  Clock fenced; // known earlier steps before a proxy fence, which the copy engine and wgmma see
  void raise(const Knowledge &other) { done.raise(other.done), fenced.raise(other.fenced); }
};

class Races {
public:
  Races(uint32_t warps, size_t bytes);

  // line: the line of the PTX, for messages. Throws a Fault.
  void access(uint32_t warp, uint32_t lane, uint32_t at, size_t bytes, Access, uint32_t line);
  void fence(uint32_t warp, uint32_t lanes);
  void meet(uint32_t warp);

  // barrier: the number of a barrier of the block, or the address of an mbarrier.
  void arrive(uint32_t warp, uint32_t lanes, uint32_t barrier);
  void complete(uint32_t barrier);
  void wait(uint32_t warp, uint32_t lanes, uint32_t barrier); // called when the barrier has completed

  // begin() returns what a copy into shared memory knows: the accesses before the copy's start. During perform(), a kAsyncWrite is the
  // copy's.
  Knowledge begin(uint32_t warp, uint32_t lane) const { return parties_[party(warp, lane)]; }
  void perform(const Knowledge &begun, uint32_t barrier);
  void end_copy(); // the copy arrives at its barrier

private:
  struct Write {
    uint32_t party = 0, step = 0, line = 0;
    bool async = false;
  };
  struct Read {
    uint32_t step = 0, line = 0;
  };
  struct Barrier {
    Knowledge coming, completed;
  };

  static uint32_t party(uint32_t warp, uint32_t lane) { return 2 * warp + (lane != 0); }
  template <class F> static void of(uint32_t warp, uint32_t lanes, F use) { // calls use() with each party that these lanes belong to
    if (lanes & 1) use(party(warp, 0));
    if (lanes & ~1u) use(party(warp, 1));
  }
  void check(const Knowledge &, uint32_t party, size_t word, Access, uint32_t line) const;
  std::string name(uint32_t party) const;

  const uint32_t count_; // number of parties, without copies
  std::vector<Knowledge> parties_;
  std::vector<Write> writes_; // the last write of each word
  std::vector<Read> reads_;   // each party's last read of each word after that write
  std::vector<Read> atomics_; // each party's last atomic access to each word after that write; empty while there was none
  std::unordered_map<uint32_t, Barrier> barriers_;
  std::unordered_map<uint32_t, uint32_t> copiers_; // for each barrier, the party of its copies
  uint32_t copier_ = 0, copies_ = 0, copy_barrier_ = 0;
  Knowledge copy_;
};

} // namespace strobe::emulator
