#include "cuda/program/prediction.h"

#include <algorithm>
#include <cmath>

#include "attention/work.h"
#include "cuda/program/arguments.h"

namespace strobe::cuda {
namespace {

double sequences(const Problem &p) {
  return p.varlen ? double(p.total_q) / double(std::max<int64_t>(1, p.seqlen_q)) : double(p.batch); // in units of the longest sequence
}

double kept(const Problem::Blocks &b) {
  return b.present ? double(b.kept) / std::max(1.0, double(b.batch * b.heads * b.rows * b.cols)) : 1;
}

} // namespace

double query_rows(const Problem &p) { return double(p.varlen ? p.total_q : p.batch * p.seqlen_q) * double(p.heads); }

double key_rows(const Problem &p) { return double(p.varlen ? p.total_k : p.batch * p.seqlen_k) * double(p.heads_kv); }

Walked walked(const Band &band, int64_t own, int64_t step, int64_t align, int64_t samples) {
  Walked w{.tiles = tiles(band.seqlen_q, own)};
  if (w.tiles == 0) return w;
  const int64_t run = tiles(w.tiles, samples) | 1; // the middle tile of each run stands for the whole run
  double sum = 0;
  for (int64_t begin = 0; begin < w.tiles; begin += run) {
    const int64_t end = std::min(begin + run, w.tiles), n = (begin + end - 1) / 2;
    const Range seen = band.keys_any(n * own, std::min<i64>((n + 1) * own, band.seqlen_q));
    const double of_tile = seen.empty() ? 0 : double(tiles(seen.end - round_down(seen.begin, align), step) * step);
    sum += double(end - begin) * of_tile, w.longest = std::max(w.longest, of_tile);
  }
  w.mean = sum / double(w.tiles);
  return w;
}

Walks walks(const Problem &p, Operation operation, int64_t tile_q, int64_t tile_k) {
  const bool forward = !writes(operation, kGradients), bounded = p.window_left != kUnbounded || p.window_right != kUnbounded;
  const i64 own = forward ? tile_q : tile_k, step = forward ? tile_k : tile_q;
  Band band = Band::make(p.seqlen_q, p.seqlen_k, p.bottom_right, p.window_left, p.window_right);
  if (!forward) band = band.transposed();
  const Walked w = walked(band, own, step, forward ? 16 : step /* schedule.h, query_tiles.h */, bounded ? 1024 : 1);
  const double of_one = double(own) * (forward ? 1 : double(p.group())) * kept(p.blocks);
  return {sequences(p) * double(forward ? p.heads : p.heads_kv) * double(w.tiles), of_one * w.mean, of_one * w.longest};
}

double Walks::last(double slots) const {
  const double rounds = blocks / slots;
  // Equal blocks take whole rounds. Of unequal blocks the longest come first, and short ones fill the gaps.
  return std::max(longest, mean * (longest > mean || rounds > 4 ? rounds : std::ceil(rounds)));
}

int64_t resident(const Device &device, int64_t shared_bytes, int64_t most) {
  return std::clamp<int64_t>(device.shared_per_sm / (shared_bytes + 1024), 1, most);
}

int32_t pairs_in_half_the_cache(const Problem &p, const Device &device) {
  const double pair = double(bytes(p.dtype)) * double(p.seqlen_k) * double(p.head_dim + p.head_dim_v) / double(p.group());
  return int32_t(std::clamp(double(device.l2) / 2 / std::max(1.0, pair), 4.0, 64.0));
}

double rows_seconds(const Problem &p, int64_t head_dim, int64_t head_dim_v, bool dq_sums) {
  constexpr double kBytes = 3e12; // per second, on an H200
  return query_rows(p) * double((dq_sums ? 10 : 2) * head_dim + 4 * head_dim_v) / kBytes;
}

double missing_seconds(const Problem &p, const Walks &w, const Device &device, int64_t tile_k, int64_t pairs, int64_t row_bytes) {
  constexpr double kBytes = 3e12;      // per second, on an H200
  constexpr double kPartOfCache = 0.6; // fits the measured rates of long causal calls with groups of 5 to 7 heads (H100)
  // Under a causal mask the walks of neighbouring key tiles differ by one query tile for each head of the group. Under a window a walk
  // begins when the blocks before it end, so the rows of a head in use at a time span the keys in progress and the window.
  const bool window = narrow_window(p);
  if (!window && w.longest < 1.05 * w.mean) return 0;     // concurrent walks stay together
  if (std::max(p.head_dim, p.head_dim_v) <= 64) return 0; // the loss was not measured there (H100, groups of 4 and 8)
  const double keys = double(device.sms) / double(pairs) * double(tile_k) + (window ? double(p.window_left + p.window_right) : 0);
  const double used = double(pairs) * double(p.group()) * std::min(double(p.seqlen_q), keys) * double(row_bytes);
  return w.scores() / double(tile_k) * double(row_bytes) * std::max(0.0, 1 - kPartOfCache * double(device.l2) / used) / kBytes;
}

double reading_seconds(const Problem &p, const Device &device) {
  constexpr double kBytesPerClock = 16; // per SM
  constexpr double kScales = 8;         // bytes of the scales of a quantised key and its value, at most
  const double numbers = double(p.stored(p.head_dim) + p.stored(p.head_dim_v));
  const double row = p.quantised() ? numbers * double(bytes(p.quantised_as)) + kScales : numbers * double(bytes(p.dtype));
  return keys_read(p) * row / (kBytesPerClock * device.clock_hz * device.sms);
}

double combining_seconds(const Problem &p) {
  constexpr double kStart = 4e-6, kRow = 2.5e-9; // measured on an H200
  return kStart + kRow * query_rows(p);
}

double seconds(const Walks &w, const Device &device, int64_t resident, double rate, double block_seconds, int64_t parts) {
  const double blocks = w.blocks * double(parts), slots = double(device.sms * resident);
  const double sharing = std::clamp(blocks / device.sms, 1.0, double(resident)); // a block that is alone has the whole SM
  return w.last(slots) / double(parts) * sharing / rate + block_seconds * std::max(1.0, blocks / slots);
}

double seconds(const Workload &work, const Measured &measured, int64_t tile_q, int64_t tile_k, int64_t head_dim, int64_t head_dim_v) {
  const auto &[p, operation, device, rate, operations, resident, launches, parts] = work;
  const bool forward = !writes(operation, kGradients);
  const double of_score = double(forward ? 2 : p.dbias ? 7 : 5) * double(head_dim + head_dim_v) * operations;
  const double scores = measured.share_of_peak[!forward] * rate * device.clock_hz / of_score; // per second and SM
  return measured.launch_seconds * double(launches) + (forward ? 0 : rows_seconds(p, head_dim, head_dim_v)) +
         seconds(walks(p, operation, tile_q, tile_k), device, resident, scores, measured.block_seconds[!forward], parts) +
         (parts > 1 ? combining_seconds(p) : 0);
}

} // namespace strobe::cuda
