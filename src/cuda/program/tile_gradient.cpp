#include "cuda/program/tile_gradient.h"

#include <initializer_list>

#include "../../../kernels/device/tile_gradient_config.h"
#include "cuda/program/arguments.h"

namespace strobe::cuda {
namespace {

constexpr KernelSource kSettle{"passes/settle.h", "strobe::passes::Settle", "strobe::TileConfig"};
constexpr KernelSource kBiasGradient{"passes/bias_gradient.h", "strobe::passes::BiasGradient", "strobe::TileConfig"};

struct Tile {
  int32_t q, k, key_warps, query_warps;
};

// The first tile that fits; with block sparsity, that lies within a block.
std::optional<TileConfig> choose(std::initializer_list<Tile> tiles, const Problem &p, const Device &device) {
  const bool wide = p.dtype == DType::f32;
  for (const Tile &tile : tiles) {
    TileConfig c{};
    c.dtype = int32_t(p.dtype), c.products = !wide ? 0 : p.allow_tf32 ? 1 : 3;
    c.head_dim = rounded(p.head_dim, wide ? 32 : 16), c.head_dim_v = rounded(p.head_dim_v, wide ? 32 : 16);
    c.tile_q = tile.q, c.tile_k = tile.k, c.key_warps = tile.key_warps, c.query_warps = tile.query_warps;
    c.aligned = aligned_backward(p), c.blocks_per_sm = 1, c.features = features_of(p);
    if (c.shared_bytes() > device.shared_per_block) continue;
    if (p.blocks.present && (p.blocks.block_q % tile.q || p.blocks.block_k % tile.k)) continue;
    return c;
  }
  return std::nullopt;
}

} // namespace

std::optional<Launch> settle(const Problem &p, const Device &device, const BackwardArguments &a) {
  const std::optional<TileConfig> c = choose({{32, 64, 4, 1}, {32, 32, 2, 1}, {16, 16, 1, 1}}, p, device);
  if (!c) return std::nullopt;
  return Launch(kSettle, *c, p.batch * p.heads * tiles(p.seqlen_q, c->tile_q), c->threads(), c->shared_bytes(), a);
}

std::optional<Launch> bias_gradient(const Problem &p, const Device &device, const BackwardArguments &a) {
  const std::optional<TileConfig> c = p.dtype == DType::f32
                                          ? choose({{64, 64, 4, 2}, {32, 32, 2, 1}, {16, 16, 1, 1}}, p, device)
                                          : choose({{64, 128, 4, 2}, {64, 64, 2, 2}, {32, 32, 2, 1}, {16, 16, 1, 1}}, p, device);
  if (!c) return std::nullopt;
  const i64 *s = a.dbias.stride;
  const int64_t blocks = c->blocks(s[0] != 0, s[1] != 0, s[2] != 0, s[3] != 0, p.batch, p.heads, p.seqlen_q, p.seqlen_k);
  return Launch(kBiasGradient, *c, blocks, c->threads(), c->shared_bytes(), a);
}

} // namespace strobe::cuda
