#include "cuda/program/dequantise.h"

#include <algorithm>

#include "../../../kernels/attention/packed_tiles.h"
#include "../../../kernels/passes/config.h"
#include "cuda/program/arguments.h"
#include "cuda/program/passes.h"

namespace strobe::cuda {
namespace {

constexpr KernelSource kDequantise{"passes/dequantise.h", "strobe::passes::Dequantise", "strobe::passes::DequantiseConfig"};

// The pages of the table, if they are fewer than those of the pools.
int64_t pages_of_table(const Problem &p) { return p.batch * p.pages_each < p.pages ? p.batch * p.pages_each : 0; }

struct Rows {
  int64_t batch, rows; // sequences or pages, and the rows of each; packed keys count as one sequence
};
Rows rows_of(const Problem &p) {
  if (p.page_size) return {pages_of_table(p) ? pages_of_table(p) : p.pages, p.page_size};
  return p.varlen ? Rows{1, p.total_k} : Rows{p.batch, p.seqlen_k};
}

} // namespace

int64_t dequantised_bytes(const Problem &p) {
  const auto [batch, rows] = rows_of(p);
  return batch * rows * p.heads_kv * (p.head_dim + p.head_dim_v) * bytes(p.dtype);
}

double dequantising_seconds(const Problem &p, const Device &device, double keys) {
  constexpr double kStart = 4e-6;        // guessed
  constexpr double kBytesPerClock = 16;  // per SM: 4.2 TB/s on an H200, of decoding's 3.7 to 4.4
  constexpr double kNumbersPerClock = 9; // per SM: counted are 9 instructions a number, at 2.6 of 4 warps' instructions a clock
  const double numbers = double(p.head_dim + p.head_dim_v), stored = double(p.stored(p.head_dim) + p.stored(p.head_dim_v));
  const double clocks = std::max((stored + double(bytes(p.dtype)) * numbers) / kBytesPerClock, numbers / kNumbersPerClock);
  return kStart + keys * clocks / (device.clock_hz * device.sms);
}

Dequantised dequantise(const Problem &p, Scratch &scratch, int64_t least_queries) {
  const auto [batch, rows] = rows_of(p);
  const Features all = features_of(p);
  passes::DequantiseConfig c{
      .dtype = int32_t(p.dtype), .head_dim = int32_t(p.head_dim), .head_dim_v = int32_t(p.head_dim_v), .features = {}};
  c.features.quant = all.quant, c.features.by_column = all.by_column, c.features.pages = all.pages, c.features.seqused = all.seqused;

  Problem d = p;
  d.quantised_as = DType::none, d.k_scale = d.v_scale = {};
  const auto reserve = [&](View &x, int64_t columns) {
    x.data = reinterpret_cast<char *>(scratch.take<uint16_t>(batch * p.heads_kv * rows * columns));
    x.dtype = p.dtype;
    x.stride[0] = p.packed_k() ? 0 : p.heads_kv * rows * columns;
    x.stride[1] = rows * columns, x.stride[2] = columns, x.stride[3] = 1;
  };
  reserve(d.k, p.head_dim), reserve(d.v, p.head_dim_v);

  QuantisedArguments<DequantiseArguments> a{};
  a.in = all_inputs(p), a.scales = key_scales(p);
  a.to_k = operand(d.k), a.to_v = operand(d.v);
  a.pages_each = i32(p.pages_each), a.least_queries = i32(least_queries);
  a.tiles = i32(std::max<int64_t>(1, tiles(p.longest_k(), c.rows())));
  if (pages_of_table(p)) {
    a.table = scratch.take<i32>(batch);
    d.set_page_table(a.table), d.pages = batch, d.page_table_row = d.pages_each;
  }
  const int64_t blocks = p.packed_k() ? count_packed_tiles(p.total_k, p.batch, c.rows()) : p.batch * a.tiles;
  return {std::move(d), Launch(kDequantise, c, blocks * p.heads_kv, c.threads(), 0, a)};
}

} // namespace strobe::cuda
