// Decodes instructions that work on tiles, by one function per family. The result is empty if the opcode belongs to another family.
#pragma once
#include <algorithm>
#include <bit>

#include "numbers.h"
#include "warp.h"

namespace strobe::emulator {

using Operands = std::vector<Operand>;

Tile decode_matrix(std::string_view opcode, const Operands &);   // ldmatrix, stmatrix, movmatrix, mma
Tile decode_wgmma(std::string_view opcode, const Operands &);    // wgmma
Tile decode_copy(std::string_view opcode, const Operands &);     // cp.async, cp.async.bulk, cp.reduce.async.bulk
Tile decode_mbarrier(std::string_view opcode, const Operands &); // mbarrier

[[noreturn]] inline void unsupported(std::string_view opcode) { throw Fault("unsupported: " + std::string(opcode)); }

inline void check_whole(uint32_t lanes) {
  if (lanes != kAllLanes) throw Fault("an .aligned instruction is executed by some lanes of the warp only");
}
template <class F> void for_each_lane(uint32_t lanes, F use) {
  for (uint32_t lane = 0; lane < kLanes; lane++)
    if (lanes >> lane & 1) use(lane);
}

// In tiles with rows of 128 bytes, the 16-byte pieces are permuted by the row's number.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Tells the barrier at this address that bytes have arrived. The barrier expects them (mbarrier.cpp).
void complete_bytes(const Warp &, uint32_t barrier, uint32_t bytes);

} // namespace strobe::emulator
