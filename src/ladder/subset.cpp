#include "ladder/subset.h"

#include "attention/text.h"
#include "score/program.h"

namespace strobe::ladder {

constexpr int64_t kMostHeadDim = 256; // the limit of the papers' kernels

std::string against(const Problem &p) {
  if (p.head_dim != p.head_dim_v) return "the head dimensions of q and v must be equal";
  if (p.head_dim > kMostHeadDim) return text("head dimensions up to ", kMostHeadDim, " only");
  if (p.varlen) return "no packed sequences";
  if (p.part) return "no parts of a larger problem";
  if (p.accumulate) return "no accumulate: it writes gradients, and adds to none";
  if (p.page_size) return "no page_table: k and v are one tensor each";
  if (p.quantised()) return "no quantised k and v: they have q's dtype";
  if (p.seqused_k) return "no seqused_k: all keys count";
  if (p.program) return "no ALiBi, softcap or hyperbolic scores, and no functions of the score or the mask";
  if (p.mask || p.bias || p.sinks || p.blocks.present || p.dropout > 0)
    return "no mask, bias, sinks, block mask or dropout; causal and windows only";
  if (p.invariant) return "not invariant: its sums are the papers' own, in tiles that begin where a tile of queries sees keys";
  if (p.dlse) return "no gradient through LSE";
  if (p.auxiliary()) return "no max_logit or column_sums";
  if (!(p.scale > 1e-30 && p.scale < 1e30)) return "the scale must be positive (1e-30 to 1e30): it stands in the exponent";
  return {};
}

} // namespace strobe::ladder
