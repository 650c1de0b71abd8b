#include "tile.h"

#include <cmath>

#include "async.h"

namespace strobe::emulator {

Tile decode_tile(std::string_view opcode, const Operands &operands) {
  for (auto decode : {decode_matrix, decode_wgmma, decode_copy, decode_mbarrier})
    if (Tile tile = decode(opcode, operands)) return tile;
  return {};
}

std::shared_ptr<BlockAsync> make_block_async() { return std::make_shared<BlockAsync>(); }
std::shared_ptr<WarpAsync> make_warp_async() { return std::make_shared<WarpAsync>(); }

void finish(Warp &warp) {
  copies_end(warp);
  products_end(warp);
  const uint32_t *n = warp.block.grid.threads;
  if (++warp.block.async->warps_ended == (n[0] * n[1] * n[2] + kLanes - 1) / kLanes) barriers_end(warp.block);
}

float from_half(uint16_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (uint32_t b = 0; b < values.size(); b++) {
      const int exponent = static_cast<int>(b >> 10 & 31), fraction = static_cast<int>(b & 1023);
      const float size = exponent == 31  ? std::bit_cast<float>(0x7F800000u | static_cast<uint32_t>(fraction) << 13)
                         : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                         : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
      values[b] = b >> 15 ? -size : size;
    }
    return values;
  }();
  return table[bits];
}

} // namespace strobe::emulator
