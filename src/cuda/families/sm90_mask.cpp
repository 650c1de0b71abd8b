#include "cuda/families/sm90_mask.h"

#include <algorithm>

#include "cuda/program/arguments.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {

template <class V> void each_pointer(const MaskArguments &a, V &visit) { visit(a.mask.data), visit(a.bits.data); }

static constexpr KernelSource kPackMask{"passes/mask_bits.h", "strobe::passes::PackMask", "strobe::MaskConfig"};

Launch pack_mask(const Problem &p, const Inputs &in, MaskOrder order, MaskBits &bits, Scratch &scratch) {
  MaskArguments a{};
  const bool by_keys = order == MaskOrder::by_keys;
  const int64_t batch = p.mask.stride[0] ? p.batch : 1, heads = p.mask.stride[1] ? p.heads : 1, queries = p.mask.stride[2] ? p.seqlen_q : 1;
  const int64_t rows = tiles(by_keys ? p.seqlen_k : queries, 16), columns = tiles(by_keys ? queries : p.seqlen_k, 64);
  const int64_t row_bytes = columns * 4 * 32;
  bits.data = scratch.take<uint8_t>(batch * heads * rows * row_bytes + MaskArguments::tail());
  bits.row_stride = rows > 1 ? row_bytes : 0;
  bits.head_stride = heads > 1 ? rows * row_bytes : 0, bits.batch_stride = batch > 1 ? heads * rows * row_bytes : 0;
  a.mask = operand(p.mask), a.bits = bits;
  a.cells = uint32_t(batch * heads * rows * columns); // 128 bytes each, so a GPU's memory holds fewer than a Divisor's 2^31
  a.heads = Divisor::make(uint32_t(heads)), a.rows = Divisor::make(uint32_t(rows)), a.columns = Divisor::make(uint32_t(columns));
  a.queries = i32(queries), a.keys = i32(p.seqlen_k);
  const bool one = !p.varlen && !p.seqused_k && queries > 1; // one band for all sequences
  a.band = narrow(one ? in.sequence(0).band : Band::make(queries, p.seqlen_k, false, Band::kFar, Band::kFar));
  if (by_keys) a.band = a.band.transposed();
  const MaskConfig config{.aligned = aligned(p.mask, p.seqlen_k), .by_keys = by_keys};
  return Launch(kPackMask, config, tiles(int64_t{a.cells}, config.threads() / 32), config.threads(), 0, a);
}

} // namespace strobe::cuda
