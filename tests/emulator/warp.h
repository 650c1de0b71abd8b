// The state that an instruction can access: the registers of the warp that executes it, and the memory of its block.
#pragma once
#include <cstddef>
#include <functional>
#include <string_view>

#include "emulator.h"
#include "races.h"

namespace strobe::emulator {

constexpr uint32_t kLanes = 32, kAllLanes = ~0u, kNoSlot = ~0u;
constexpr uint32_t kSharedBegin = 1024; // the first address of shared memory; not 0, so that a null pointer is noticed

struct BlockAsync; // async.h: the copies and products that are in flight
struct WarpAsync;

struct alignas(128) ArgumentLine { // tensor maps among the arguments need 64 bytes
  std::byte bytes[128];
};
struct Grid {
  const Machine &machine;
  std::vector<ArgumentLine> arguments{};
  size_t argument_bytes = 0;
  uint32_t blocks[3] = {}, threads[3] = {};
  uint64_t changes = 0; // counts events that may end a wait (stores, arrivals); if there are none and all warps wait, there is a deadlock
  uint64_t clock = 0;
  uint32_t line = 0; // the PTX line of the current instruction
};

struct Block {
  Grid &grid;
  uint32_t index[3];
  std::byte *shared; // at kSharedBegin
  uint32_t shared_end;
  std::shared_ptr<BlockAsync> async;
  std::unique_ptr<Races> races{};               // null: no search for races
  bool lets_next_begin = false, waited = false; // whether griddepcontrol's launch_dependents, and its wait, have been executed
};

struct Operand {
  enum Kind : uint8_t {
    kRegister,  // slot; bits 16, 32, 64, 128
    kPredicate, // slot; the first word holds a bit for each lane
    kImmediate, // value (bits of a float as PTX writes them: 0f3F800000)
    kAddress,   // [slot + value], kNoSlot: [value]; bits 32 or 64 of the register; parts: the coordinates in [map, {x, y}]
    kVector,    // parts
    kSink       // _
  };
  Kind kind = kSink;
  uint8_t bits = 0;
  uint32_t slot = kNoSlot;
  uint64_t value = 0;
  std::vector<Operand> parts{};
};

struct Warp {
  Block &block;
  uint32_t index;             // the warp's number in its block
  std::byte *registers;       // slots of 32 words
  std::byte *local = nullptr; // local memory of lane 0, followed by that of the other lanes
  uint32_t local_bytes = 0;   // per lane
  bool waits = false;         // set by an instruction whose condition is not met: another warp runs next
  std::shared_ptr<WarpAsync> async{};

  // A register of 32 (64) bits has one word (two words) for each lane. Registers of 16 bits are the halves of the first 16 words.
  template <class T> T *lanes(uint32_t slot) const { return reinterpret_cast<T *>(registers + size_t(slot) * kLanes * 4); }
  uint32_t *words(const Operand &o) const { return lanes<uint32_t>(o.slot); }
  uint32_t &predicate(const Operand &o) const { return *words(o); } // a bit for each lane
  uint64_t value(const Operand &o, uint32_t lane) const {           // of a register, an immediate, or an address (register + offset)
    if (o.slot == kNoSlot) return o.value;
    return o.bits == 64 ? o.value + lanes<uint64_t>(o.slot)[lane] : uint32_t(o.value + lanes<uint32_t>(o.slot)[lane]);
  }

  // The host address of one lane's access to shared memory. Checks alignment and bounds, and throws a Fault. `address`: in the window of
  // shared memory, whose first byte is kSharedBegin.
  std::byte *shared(uint64_t address, size_t bytes, size_t alignment, Access access, uint32_t lane) const {
    if (address < kSharedBegin || address + bytes > block.shared_end || address % alignment) bad_shared(address, bytes, alignment);
    const size_t at = address - kSharedBegin;
    if (block.races && access != Access::kSynchronize) block.races->access(index, lane, uint32_t(at), bytes, access, block.grid.line);
    return block.shared + at;
  }
  [[noreturn]] void bad_shared(uint64_t address, size_t bytes, size_t alignment) const;
};

[[noreturn]] void bad_global(uint64_t address, size_t bytes, size_t alignment);
bool is_mapped(uint64_t page); // remembers the answer until run() ends
constexpr uint64_t kPage = 4096;
inline constinit thread_local uint64_t mapped_pages[64] = {}; // complements of the pages' numbers
// A generic address is a host address. The check asks only whether it is mapped; AddressSanitizer knows whether it is allocated.
inline std::byte *global(uint64_t address, size_t bytes, size_t alignment) {
  const uint64_t first = address / kPage, last = (address + bytes - 1) / kPage;
  for (uint64_t page = first; page <= last; page++)
    if (mapped_pages[page % 64] != ~page && !is_mapped(page)) bad_global(address, bytes, alignment);
  if (address % alignment) bad_global(address, bytes, alignment);
  return reinterpret_cast<std::byte *>(address);
}

// A decoded instruction of the tile files (ldmatrix, mma, wgmma, cp.async, mbarrier ...). It is executed for the lanes whose bit is set. An
// .aligned instruction is called when all lanes of the warp have arrived.
using Tile = std::function<void(Warp &, uint32_t lanes)>;
// opcode: with all modifiers, for example "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32". operands: as written, the destination first.
// The result is empty if no tile file has the opcode. Throws a Fault if a tile file has it, but not these modifiers.
Tile decode_tile(std::string_view opcode, const std::vector<Operand> &operands);

std::shared_ptr<BlockAsync> make_block_async();
std::shared_ptr<WarpAsync> make_warp_async();
// Called when all threads of a warp have ended. Completes the warp's operations in flight; throws a Fault if they would read shared memory
// after the block's end.
void finish(Warp &);

} // namespace strobe::emulator
