#include "tile.h"

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
  if (++warp.block.async->warps_ended < (n[0] * n[1] * n[2] + kLanes - 1) / kLanes) return;
  barriers_end(warp.block);
  if (warp.block.lets_next_begin && !warp.block.waited)
    throw Fault("the block ends without griddepcontrol.wait: the launch after next may begin before the one before has ended");
}

} // namespace strobe::emulator
