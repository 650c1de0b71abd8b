// The kernels of kernels/mma: FP16 and BF16 on tensor cores by mma.sync, from sm_80 (FP16: sm_75).
#include <algorithm>
#include <cmath>

#include "../../../kernels/mma/config.h"
#include "attention/text.h"
#include "attention/work.h"
#include "cuda/families/families.h"
#include "cuda/families/mma_backward.h"
#include "cuda/program/arguments.h"
#include "cuda/program/prediction.h"
#include "cuda/program/rows.h"
#include "cuda/program/wishes.h"

namespace strobe::cuda {
namespace {

using mma::Config;

constexpr KernelSource kForward{"mma/forward/forward.h", "strobe::mma::Forward", "strobe::mma::Config"};
constexpr KernelSource kDecode{"mma/decode/decode.h", "strobe::mma::Decode", "strobe::mma::Config"};

struct Tile {
  int32_t most_dim, q, k, warps, stages, ctas; // ctas: per SM, what the registers are limited for
};

// From the fastest to the smallest, measured on an H200; none spills. A warp owns q / warps rows: 32 read K and V from shared memory half
// as often as 16 do, but leave no registers for features or copies by element.
enum Load { plain, sparse, sparse_band, features, anything }; // what a tile has registers for
struct ForwardTile : Tile {
  Load most;
  int32_t least_cc = 75, most_cc = 1000;
  int64_t least_queries = 0; // of shorter causal sequences smaller tiles waste less
  int32_t least_dim = 0;
};
constexpr ForwardTile kForwardTiles[] = {
    {{64, 128, 96, 4, 2, 2}, plain, 80, 99, 2048},
    {{64, 128, 64, 4, 2, 2}, sparse_band, 80, 1000, 2048},
    {{128, 128, 64, 4, 2, 2}, plain, 90, 90}, // whose uniform registers hold the loop's state
    {{128, 128, 64, 4, 2, 2}, sparse, 90, 90, 0, 97},
    {{128, 128, 32, 4, 2, 2}, plain, 80, 89},
    {{128, 128, 32, 4, 2, 2}, sparse_band, 90, 90},
    {{192, 128, 128, 8, 1, 1}, plain, 90, 90, 4096},
    {{256, 128, 128, 8, 1, 1}, plain, 90, 90, 4096, 225},
    {{128, 64, 64, 4, 1, 2}, features, 100},
    {{128, 64, 64, 4, 2, 2}, features},
    {{128, 64, 64, 4, 1, 2}, features},
    {{192, 64, 64, 4, 1, 2}, sparse_band, 90, 90},
    {{256, 64, 64, 4, 1, 2}, plain, 90, 90},
    {{128, 64, 32, 4, 2, 2}, anything},
    {{256, 64, 32, 4, 1, 2}, anything},
    {{256, 32, 32, 2, 1, 2}, anything},
    {{256, 16, 32, 1, 1, 2}, anything},
};
constexpr Tile kDecodeTiles[] = {
    {128, 16, 16, 4, 3, 2}, {256, 16, 16, 4, 3, 1}, {256, 16, 16, 2, 2, 1}, // up to 16 packed rows
    {128, 32, 16, 4, 3, 1}, {256, 16, 16, 4, 2, 1},                         // more
};

// But for the tile.
Config config_for(const Problem &p) {
  Config c{};
  c.dtype = int32_t(p.dtype);
  c.head_dim = rounded(p.head_dim, 32), c.head_dim_v = rounded(p.head_dim_v, 32);
  c.aligned = aligned(p.q, p.head_dim) && aligned(p.k, p.head_dim) && aligned(p.v, p.head_dim_v) && aligned(p.out, p.head_dim_v);
  c.exact_max = p.exact_max;
  c.features = features_of(p);
  return c;
}

Config with(Config c, const Tile &tile) {
  c.tile_q = tile.q, c.tile_k = tile.k, c.warps = tile.warps, c.stages = tile.stages, c.blocks_per_sm = tile.ctas;
  return c;
}

Load load_of(const Config &c) {
  const Features &f = c.features;
  const int many = 2 * !!f.function + !!f.bias + f.mask + f.alibi + f.dropout + f.scaled;
  if (many > 2) return anything;
  if (many || !c.aligned) return features;
  return !f.blocks ? plain : f.band ? sparse_band : sparse;
}

// The first tile that fits, or with wishes the nearest.
bool choose(Config &chosen, const Problem &p, const Device &device) {
  const Config any = config_for(p);
  const int32_t dim = std::max(any.head_dim, any.head_dim_v);
  const Load load = load_of(any);
  double least = HUGE_VAL;
  for (const ForwardTile &tile : kForwardTiles) {
    const Config c = with(any, tile);
    if (dim > tile.most_dim || dim < tile.least_dim || load > tile.most) continue;
    if (device.cc < tile.least_cc || device.cc > tile.most_cc || (c.features.band && p.seqlen_q < tile.least_queries)) continue;
    if (c.forward_shared_bytes() > device.shared_per_block || (p.blocks.present && p.blocks.block_q % tile.q)) continue;
    const double cost = distance(p.tile_q, tile.q) + distance(p.tile_k, tile.k);
    if (cost < least) least = cost, chosen = c;
  }
  return least < HUGE_VAL;
}

constexpr int64_t kMostPackedRows = 64;

// Decode packs the query heads of a group into the rows of a tile; a block-sparse mask may differ between them.
bool decodes(const Problem &p) { return !p.blocks.present && p.seqlen_q * p.group() <= kMostPackedRows; }
bool choose_decode(Config &chosen, const Problem &p, const Device &device) {
  const int64_t rows = p.seqlen_q * p.group();
  const Config any = config_for(p);
  for (const Tile &tile : kDecodeTiles) {
    const Config c = with(any, tile);
    if (std::max(c.head_dim, c.head_dim_v) > tile.most_dim || c.decode_shared_bytes() > device.shared_per_block) continue;
    if (rows > 16 && tile.q == 16 && &tile != &kDecodeTiles[std::size(kDecodeTiles) - 1]) continue;
    chosen = c;
    return true;
  }
  return false;
}

// As many parts as fill the GPU once: too few leave it idle, more are a second wave. Each part is worth its own O: at least `least` keys.
int32_t splits(int64_t ctas, int64_t slots, int64_t seqlen_k, int64_t least) {
  if (ctas <= 0) return 1;
  return int32_t(std::clamp<int64_t>(slots / ctas, 1, std::clamp<int64_t>(seqlen_k / least, 1, 256)));
}

// Dense FLOP per clock and SM of mma.sync with FP32 sums.
double rate(const Device &device) {
  switch (device.cc) {
  case 80:
  case 90:
    return 2048;
  case 100:
  case 103:
    return 2048;
  default:
    return device.cc >= 87 && device.cc < 89 ? 1024 : 512;
  }
}

// Measured on an H200. A block of the decode merges its warps' rows at the end, one after another.
constexpr double kShareOfPeak = 0.7, kLaunchSeconds = 4e-6, kEndsSeconds = 6e-6, kDecodeEndsSeconds = 2.5e-6, kMergedRowSeconds = 1e-7;

double predicted_seconds(const Problem &p, const Config &c, const Device &device, bool decode, int64_t resident, int64_t parts) {
  const double flop = 2.0 * (c.head_dim + c.head_dim_v), of_sm = kShareOfPeak * rate(device) * device.clock_hz;
  double computing = 0, ends = 0;
  if (decode) {
    const int64_t rows = p.seqlen_q * p.group();
    const double blocks = double(p.batch * p.heads_kv * tiles(rows, c.tile_q) * parts);
    computing = visible_scores(p) / std::min(1.0, double(p.seqlen_q) / 16) * flop / (of_sm * device.sms);
    ends = (kDecodeEndsSeconds + kMergedRowSeconds * double(std::min<int64_t>(rows, c.tile_q))) * std::max(1.0, blocks / device.sms);
  } else {
    computing = seconds(walks(p, Direction::forward, c.tile_q, c.tile_k), device, resident, of_sm / flop, kEndsSeconds, parts);
  }
  return kLaunchSeconds + ends + std::max(computing, reading_seconds(p, device)) + (parts > 1 ? combining_seconds(p) : 0);
}

class MmaEngine final : public CudaEngine {
public:
  const char *name() const override { return "cuda-mma"; }

protected:
  Made program(const Problem &p, Direction direction, const Device &device, Scratch &scratch) const override {
    if (p.dtype != DType::f16 && p.dtype != DType::bf16) return text("takes float16 and bfloat16, not ", strobe::name(p.dtype));
    if (device.cc < 75) return text(device.name, " has no mma.sync of this shape: sm_75 or newer is needed, this is sm_", device.cc);
    if (device.cc < 80 && p.dtype == DType::bf16)
      return text(device.name, " multiplies no bfloat16: sm_80 or newer is needed, this is sm_", device.cc);
    if (std::string reason = outsized_scale(p); !reason.empty()) return reason;
    if (direction == Direction::backward) return mma_backward(p, device, scratch);
    return forward(p, device, scratch);
  }

private:
  static Made forward(const Problem &p, const Device &device, Scratch &scratch) {
    ForwardArguments a = forward_arguments(p);
    Config c;
    const bool decode = decodes(p) && choose_decode(c, p, device);
    if (!decode && !choose(c, p, device))
      return text("no tile fits the ", device.shared_per_block, " bytes of shared memory and divides the blocks of block_rows");
    const int32_t shared = decode ? c.decode_shared_bytes() : c.forward_shared_bytes();
    const int64_t ctas =
        decode ? p.batch * p.heads_kv * tiles(p.seqlen_q * p.group(), c.tile_q) : p.batch * p.heads * tiles(p.seqlen_q, c.tile_q);
    const int64_t side = decode ? 1 : resident(device, shared, c.blocks_per_sm); // decode: fewer parts to merge
    a.splits = splits(ctas, device.sms * side, p.seqlen_k, 256);
    if (!decode && predicted_seconds(p, c, device, false, side, 1) < predicted_seconds(p, c, device, false, side, a.splits)) a.splits = 1;
    a.bundle = bundle(p, device);
    if (a.splits > 1) {
      const int64_t rows = a.in.rows();
      a.partial_out = scratch.take<float>(a.splits * rows * p.head_dim_v);
      a.partial_lse = scratch.take<float>(a.splits * rows);
    }
    Program program;
    program.overlap = true;
    program.steps.push_back(Launch(decode ? kDecode : kForward, c, ctas * a.splits, c.threads(), shared, a));
    if (a.splits > 1) program.steps.push_back(combine(p, a));
    describe(program, p, c, decode, a.splits);
    program.predicted_seconds = predicted_seconds(p, c, device, decode, side, a.splits);
    return program;
  }

  // (batch, head) pairs whose tiles run together: their K and V should stay in half of the L2 cache.
  static int32_t bundle(const Problem &p, const Device &device) {
    const double bytes = 2 * double(p.seqlen_k) * double(p.head_dim + p.head_dim_v) / double(p.group());
    return int32_t(std::clamp(double(device.l2) / 2 / std::max(1.0, bytes), 4.0, 64.0));
  }

  static void describe(Program &program, const Problem &p, const Config &c, bool decode, int32_t splits) {
    program.kernel = text(strobe::name(p.dtype), " mma.sync, ", c.warps, " warps, ", c.stages, " stages, head dimensions ", c.head_dim,
                          " and ", c.head_dim_v, decode ? ", query heads packed" : "");
    if (splits > 1) program.kernel += text(", keys split in ", splits);
    describe_tile(program, p, c.tile_q, c.tile_k, c.aligned);
  }
};

} // namespace

const CudaEngine &mma_engine() {
  static const MmaEngine engine;
  return engine;
}

} // namespace strobe::cuda
