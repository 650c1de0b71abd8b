#include "attention/padding.h"

#include <algorithm>
#include <cstring>

namespace strobe {
namespace {

// Rows [begin, end) of one sequence's heads.
struct Range {
  int64_t batch, begin, end;
};

void clear(const View &to, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t width) {
  const int64_t element = bytes(to.dtype);
  for (int64_t i = begin; i < end; i++) {
    char *row = to.data + to.index(b, h, i, 0) * element;
    if (to.stride[3] == 1 || width == 1) {
      std::memset(row, 0, static_cast<size_t>(width * element));
      continue;
    }
    for (int64_t c = 0; c < width; c++) std::memset(row + c * to.stride[3] * element, 0, static_cast<size_t>(element));
  }
}

// Clears rows, one item per head of a sequence. Threads are started only if there is much to clear. range_of(b): the rows of sequence b.
template <class RangeOf>
void clear(const View &to, const Execution &execution, int64_t batch, int64_t heads, int64_t width, RangeOf &&range_of) {
  if (!to) return;
  constexpr int64_t kWorthThreads = 1 << 20; // bytes
  int64_t rows = 0;
  for (int64_t b = 0; b < batch; b++) {
    const Range range = range_of(b);
    rows += std::max<int64_t>(0, range.end - range.begin);
  }
  if (!rows) return;
  const bool many = rows > kWorthThreads / (heads * width * bytes(to.dtype));
  const int64_t items = batch * heads, shares = many ? std::min<int64_t>(items, execution.threads) : 1;
  auto share_of = [&](int32_t share) {
    for (int64_t n = share; n < items; n += shares) {
      const Range range = range_of(n / heads);
      clear(to, range.batch, n % heads, range.begin, range.end, width);
    }
  };
  if (shares == 1)
    share_of(0);
  else
    execution.run(static_cast<int32_t>(shares), share_of);
}

template <class T> void fill(const View &to, int64_t heads, int64_t begin, int64_t end, T x) {
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = begin; i < end; i++) *to.at<T>(0, h, i, 0) = x;
}

// The keys of sequence b that do not count: those from seqused_k on.
Range unused(const Problem &p, int64_t b) {
  const Problem::Rows held = p.held_k(b), used = p.rows_k(b);
  return {b, held.begin + used.length, held.begin + held.length};
}

} // namespace

void clear_padding_of_keys(const Problem &p, const Execution &execution, Operation operation) {
  if (writes(operation, kGradients) && p.accumulate) return; // nothing is added to gradients of padding
  const auto each = [&](int64_t batch, auto &&range_of) {
    if (!writes(operation, kGradients)) return clear(p.column_sums, execution, batch, p.heads, 1, range_of);
    clear(p.dk, execution, batch, p.heads_kv, p.head_dim, range_of);
    clear(p.dv, execution, batch, p.heads_kv, p.head_dim_v, range_of);
  };
  if (p.seqused_k) each(p.batch, [&](int64_t b) { return unused(p, b); });
  if (p.packed_k()) each(1, [&](int64_t) { return Range{0, p.cu_seqlens_k[p.batch], p.total_k}; });
}

void clear_padding_of_queries(const Problem &p, const Execution &execution, Operation operation) {
  if (!p.varlen) return;
  if (writes(operation, kGradients) && p.accumulate) return; // nothing is added to gradients of padding
  const auto behind = [&](int64_t) { return Range{0, p.cu_seqlens_q[p.batch], p.total_q}; };
  if (writes(operation, kGradients)) return clear(p.dq, execution, 1, p.heads, p.head_dim, behind);
  if (writes(operation, kTangentsOfResults)) {
    clear(p.tout, execution, 1, p.heads, p.head_dim_v, behind);
    clear(p.tlse, execution, 1, p.heads, 1, behind);
  }
  clear(p.out, execution, 1, p.heads, p.head_dim_v, behind);
  if (!p.lse) return;
  if (p.part.partial) {
    View low = p.lse;
    low.data += p.lse_low * bytes(low.dtype);
    clear(low, execution, 1, p.heads, 1, behind);
  }
  const Range rows = behind(0);
  if (p.lse.dtype == DType::f64)
    fill(p.lse, p.heads, rows.begin, rows.end, -std::numeric_limits<double>::infinity());
  else
    fill(p.lse, p.heads, rows.begin, rows.end, -std::numeric_limits<float>::infinity());
}

} // namespace strobe
