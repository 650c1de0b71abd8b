// Races in a block's shared memory: two accesses, one of them a write, that nothing orders; and accesses by the copy engine or wgmma to what
// threads wrote, without a proxy fence between. Of a warp, lane 0, which is mostly the one that arrives and waits for all, is told from the
// others; these are not told from one another. Where all lanes meet (.sync, .aligned) they know of one another what was done before.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace strobe::emulator {

enum class Access : uint8_t { kRead, kWrite, kAsyncRead, kAsyncWrite, kSynchronize };

// Of each party, how many of its steps. A party: lane 0 of a warp, the others of a warp, or the copies that complete on one barrier.
class Clock {
public:
  uint32_t operator[](uint32_t party) const { return party < steps_.size() ? steps_[party] : 0; }
  void raise(uint32_t party, uint32_t step);
  void raise(const Clock &);

private:
  std::vector<uint32_t> steps_;
};
struct Knowledge {
  Clock done;   // came before
  Clock fenced; // and a proxy fence after it: the copy engine and wgmma see it
  void raise(const Knowledge &other) { done.raise(other.done), fenced.raise(other.fenced); }
};

class Races {
public:
  Races(uint32_t warps, size_t bytes);

  // line: of the PTX, for messages. Throws Fault.
  void access(uint32_t warp, uint32_t lane, uint32_t at, size_t bytes, Access, uint32_t line);
  void fence(uint32_t warp, uint32_t lanes);
  void meet(uint32_t warp);

  // A barrier of the block by its number, an mbarrier by its address.
  void arrive(uint32_t warp, uint32_t lanes, uint32_t barrier);
  void complete(uint32_t barrier);
  void wait(uint32_t warp, uint32_t lanes, uint32_t barrier); // it has completed

  // A copy into shared memory: knows what was done when it began. While one is performed, kAsyncWrite is its.
  Knowledge begin(uint32_t warp, uint32_t lane) const { return parties_[party(warp, lane)]; }
  void perform(const Knowledge &begun, uint32_t barrier);
  void end_copy(); // arrives at its barrier

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
  template <class F> static void of(uint32_t warp, uint32_t lanes, F use) { // its parties of which there are lanes
    if (lanes & 1) use(party(warp, 0));
    if (lanes & ~1u) use(party(warp, 1));
  }
  void check(const Knowledge &, uint32_t party, size_t word, Access, uint32_t line) const;
  std::string name(uint32_t party) const;

  const uint32_t count_; // of parties but for copies
  std::vector<Knowledge> parties_;
  std::vector<Write> writes_; // of each word, the last
  std::vector<Read> reads_;   // of each word by each party, the last since
  std::unordered_map<uint32_t, Barrier> barriers_;
  std::unordered_map<uint32_t, uint32_t> copiers_; // the party of a barrier's copies
  uint32_t copier_ = 0, copies_ = 0, copy_barrier_ = 0;
  Knowledge copy_;
};

} // namespace strobe::emulator
