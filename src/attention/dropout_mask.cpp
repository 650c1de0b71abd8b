#include "attention/dropout_mask.h"

#include "attention/options.h"
#include "attention/tensor_check.h"
#include "attention/versioned.h"
#include "kernels/attention/dropout.h"

namespace strobe {

void dropout_mask(const strobe_attention *attention, const strobe_tensor *rng, const strobe_tensor *keep) {
  Reasons reasons;
  const strobe_attention a = read_versioned("attention", attention, reasons);
  check_dropout(a, reasons);
  TensorChecks checks(reasons);
  const strobe_tensor host{}; // zeros: the CPU
  checks.on_device_of(host, "");
  if (!keep) {
    reasons.add("keep", "missing; accepted is a tensor");
  } else {
    checks.accept("keep", *keep, {{"B"}, {"H"}, {"Sq"}, {"Sk"}}, {DType::boolean}, Access::write);
  }
  if (rng && checks.accept("rng", *rng, {{"seed and offset", 2}}, {DType::i64}, Access::read)) checks.contiguous("rng", *rng);
  check_overlaps(checks.placed(), reasons);
  reasons.raise_if_any();

  const int64_t *drawn = rng ? static_cast<const int64_t *>(rng->data) : nullptr;
  const DropoutKey key = drawn ? dropout_key(drawn[0], drawn[1]) : dropout_key(a.seed, a.offset);
  const u32 threshold = dropout_threshold(a.dropout);
  const int64_t *size = keep->shape, *stride = keep->strides;
  for (int64_t b = 0; b < size[0]; b++)
    for (int64_t h = 0; h < size[1]; h++)
      for (int64_t i = 0; i < size[2]; i++)
        for (int64_t j = 0; j < size[3]; j++)
          static_cast<uint8_t *>(keep->data)[b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3]] =
              dropout_keep(key, threshold, b, h, i, j);
}

} // namespace strobe
