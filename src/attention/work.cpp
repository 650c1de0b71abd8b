#include "attention/work.h"

#include <algorithm>
#include <cmath>

#include "attention/text.h"

namespace strobe {

// An estimate of a part's visible scores: each query of a range counts as many keys as the range's middle query.
static double visible_in_part(const Problem &p) {
  double scores = 0;
  for (int64_t b = 0; b < p.batch; b++) {
    const double offset = p.bottom_right ? double(p.whole_k(b) - p.whole_q(b)) : 0;
    for (int64_t n = 0; n < p.part.count_q; n++) {
      const RowRange queries = p.range_q(b, n);
      if (!queries.length) continue;
      const double at = double(queries.start) + double(queries.length - 1) / 2 + offset;
      for (int64_t m = 0; m < p.part.count_k; m++) {
        const RowRange keys = p.range_k(b, m);
        const double first = p.window_left == kUnbounded ? double(keys.start) : std::max(double(keys.start), at - double(p.window_left));
        const double end =
            p.window_right == kUnbounded ? double(keys.end()) : std::min(double(keys.end()), at + double(p.window_right) + 1);
        scores += double(queries.length) * std::max(0.0, end - first);
      }
    }
  }
  return double(p.heads) * scores;
}

double mean_keys(const Problem &p, int64_t seqlen_q, int64_t seqlen_k) {
  if (seqlen_q == 0) return 0;
  // The sum of min(max(t, 0), seqlen_k) over all t up to x: how many keys successive queries do not see at one end. Positions have 30 bits.
  const auto lost = [&](int64_t x) {
    const auto triangle = [](int64_t n) { return n > 0 ? n * (n + 1) / 2 : 0; };
    return triangle(x) - triangle(x - seqlen_k);
  };
  const int64_t offset = p.bottom_right ? seqlen_k - seqlen_q : 0;
  int64_t scores = seqlen_q * seqlen_k;
  if (p.window_right != kUnbounded) {
    const int64_t first = seqlen_k - 1 - offset - p.window_right;
    scores -= lost(first) - lost(first - seqlen_q);
  }
  if (p.window_left != kUnbounded) {
    const int64_t first = offset - p.window_left;
    scores -= lost(first + seqlen_q - 1) - lost(first - 1);
  }
  return double(std::max<int64_t>(0, scores)) / double(seqlen_q);
}

double visible_scores(const Problem &p) {
  const double q = double(p.longest_q()), keys = mean_keys(p, p.longest_q(), p.longest_k());
  double share = 1;
  if (p.blocks.present)
    share = double(p.blocks.kept) / std::max(1.0, double(p.blocks.batch * p.blocks.heads * p.blocks.rows * p.blocks.cols));
  if (p.part) return visible_in_part(p) * share;
  double sequences = p.varlen ? double(p.total_q) / std::max(1.0, q) : double(p.batch);
  return sequences * double(p.heads) * q * keys * share;
}

bool narrow_window(const Problem &p) {
  const bool bounded = p.window_left != kUnbounded && p.window_right != kUnbounded;
  return bounded && p.window_left + p.window_right < p.longest_k() / 2;
}

double keys_read(const Problem &p) {
  const bool bounded = p.window_right != kUnbounded && p.window_left != kUnbounded;
  const double most = bounded ? double(p.longest_q()) + double(p.window_left) + double(p.window_right) : double(p.longest_k());
  return double(p.heads_kv) * std::min(double(p.total_k), double(p.batch) * most);
}

std::string auxiliary_note(const Problem &p, double pass, double all) {
  const char *what = !p.column_sums ? "max_logit" : !p.max_logit ? "column_sums" : "max_logit and column_sums";
  return text(what, ": another pass over the scores after the forward, ", std::lround(100 * pass / all), "% of the predicted time");
}

double flops(const Problem &p, Operation operation) {
  const OperationRecord &products = record(operation);
  return visible_scores(p) * 2 * double(products.products_d * p.head_dim + products.products_dv * p.head_dim_v);
}

} // namespace strobe
