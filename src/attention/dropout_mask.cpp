#include "attention/dropout_mask.h"

#include <algorithm>

#include "attention/options.h"
#include "attention/tensor_check.h"
#include "attention/versioned.h"
#include "kernels/attention/dropout.h"

namespace strobe {
namespace {

constexpr int64_t kBlock = 16; // queries and keys per block; each of its groups of 4 x 4 elements takes one Philox call

// Writes the mask of a block of queries of one head.
void write_rows(const strobe_tensor &keep, DropoutKey key, u32 threshold, int64_t b, int64_t h, int64_t i0) {
  const int64_t *size = keep.shape, *stride = keep.strides;
  uint8_t *head = static_cast<uint8_t *>(keep.data) + b * stride[0] + h * stride[1];
  const int64_t rows = std::min(kBlock, size[2] - i0);
  for (int64_t j0 = 0; j0 < size[3]; j0 += kBlock) {
    Philox bits[4][4];
    for (u32 q = 0; q < 4; q++)
      for (u32 k = 0; k < 4; k++)
        bits[q][k] = dropout_bits(key, dropout_group(j0) + k, dropout_group(i0) + q, static_cast<u32>(h), static_cast<u32>(b));
    const int64_t columns = std::min(kBlock, size[3] - j0);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        const u32 word = bits[dropout_group(i)][dropout_group(j)].x[dropout_slot(i)];
        head[(i0 + i) * stride[2] + (j0 + j) * stride[3]] = (word >> 8 * dropout_slot(j) & 0xFF) < threshold;
      }
  }
}

} // namespace

void dropout_mask(const strobe_attention *attention, const strobe_tensor *rng, const strobe_tensor *keep, const strobe_execution *how) {
  Reasons reasons;
  const strobe_attention a = read_versioned("attention", attention, reasons);
  check_dropout(a, reasons);
  TensorChecks checks(reasons);
  const strobe_tensor host{}; // a device of zeros is the CPU
  checks.on_device_of(host, nullptr);
  if (!keep) {
    reasons.add("keep", Code::missing, "missing; accepted is a tensor");
  } else {
    checks.accept("keep", *keep, {{"B"}, {"H"}, {"Sq"}, {"Sk"}}, {DType::boolean}, Access::write);
  }
  if (rng) checks.accept("rng", *rng, {{"seed and offset", 2}}, {DType::i64}, Access::read);
  check_overlaps(checks.placed(), reasons);
  reasons.raise_if_any();
  const Execution execution = validate(how);

  int64_t drawn[2] = {static_cast<int64_t>(a.seed), static_cast<int64_t>(a.offset)};
  if (rng) gather(*rng, sizeof *drawn, drawn);
  const DropoutKey key = dropout_key(drawn[0], drawn[1]);
  const u32 threshold = dropout_threshold(a.dropout);
  const int64_t *size = keep->shape;
  if (std::count(size, size + 4, 0)) return;
  const int64_t blocks = (size[2] + kBlock - 1) / kBlock, items = size[0] * size[1] * blocks;
  const int32_t shares = static_cast<int32_t>(std::min<int64_t>(items, 1 << 20));
  execution.run(shares, [&](int32_t share) {
    for (int64_t n = share; n < items; n += shares)
      write_rows(*keep, key, threshold, n / blocks / size[1], n / blocks % size[1], n % blocks * kBlock);
  });
}

} // namespace strobe
