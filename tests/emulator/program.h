// A parsed program: for each kernel an array of decoded instructions.
#pragma once
#include <map>

#include "warp.h"

namespace strobe::emulator {

struct Instruction;
using Execute = void (*)(Warp &, const Instruction &, uint32_t lanes); // executes the instruction for the lanes whose bit is set

struct Instruction {
  enum Kind : uint8_t {
    kPlain,
    kAligned, // waits until all lanes of the warp that have not ended have arrived
    kMasked,  // waits until all lanes of the mask have arrived
    kBranch,
    kEnd,
  };
  Kind kind = kPlain;
  bool guarded = false, guard_negated = false;
  bool wide = false; // the address has 64 bits
  uint8_t count = 1; // number of elements of a vector
  uint32_t guard = kNoSlot, target = 0, line = 0;
  uint32_t d = kNoSlot, d2 = kNoSlot;                   // registers that it writes
  uint32_t a[4] = {kNoSlot, kNoSlot, kNoSlot, kNoSlot}; // registers that it reads; for a vector those of its elements, read or written
  uint32_t address = kNoSlot, mask = kNoSlot;
  int64_t offset = 0;
  Execute execute = nullptr;
  std::shared_ptr<const Tile> tile{};
};
inline void nothing(Warp &, const Instruction &, uint32_t) {} // an Execute that does nothing

// A register that is never written.
struct Constant {
  enum Of : uint8_t { kNumber, kThread, kThreads, kBlock, kBlocks, kLane };
  Of of = kNumber;
  uint8_t bits = 32, axis = 0;
  uint64_t value = 0; // the value of a number
  uint32_t slot = 0;
};

struct Kernel {
  std::string name;
  KernelInfo info{};
  uint32_t slots = 0, local_bytes = 0;
  std::vector<Constant> constants{};
  std::vector<Instruction> code{};

  uint32_t new_slot(uint32_t bits) {
    const uint32_t slot = slots;
    return slots += (bits + 31) / 32, slot;
  }
  uint32_t constant(uint64_t value, uint8_t bits);
};

struct Module {
  std::vector<std::string> lines;
  std::map<std::string, Kernel> kernels;
  std::vector<std::unique_ptr<std::byte[]>> globals; // memory of globals
};

// Sets the members that follow from the opcode and the operands. Throws a Fault if the opcode is unknown or operands do not suit it.
void decode(Kernel &, Instruction &, const std::string &opcode, const std::vector<Operand> &);

} // namespace strobe::emulator
