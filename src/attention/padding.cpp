#include "attention/padding.h"

#include <cstring>

namespace strobe {
namespace {

template <class T> void fill(const View &to, int64_t heads, int64_t width, int64_t begin, int64_t end, T x) {
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = begin; i < end; i++)
      for (int64_t c = 0; c < width; c++) *to.at<T>(0, h, i, c) = x;
}

void clear(const View &to, int64_t heads, int64_t width, int64_t begin, int64_t end) {
  if (!to) return;
  switch (bytes(to.dtype)) {
  case 2:
    return fill<uint16_t>(to, heads, width, begin, end, 0);
  case 4:
    return fill<float>(to, heads, width, begin, end, 0);
  default:
    return fill<double>(to, heads, width, begin, end, 0);
  }
}

// dk or dv of the keys of each sequence that do not count.
void clear_unused(const Problem &p, const View &to, int64_t width) {
  if (!to) return;
  for (int64_t b = 0; b < p.batch; b++) {
    const Problem::Rows held = p.held_k(b), used = p.rows_k(b);
    View of_batch = to;
    of_batch.data += b * to.stride[0] * bytes(to.dtype);
    clear(of_batch, p.heads_kv, width, held.begin + used.length, held.begin + held.length);
  }
}

} // namespace

void clear_padding_of_keys(const Problem &p) {
  if (p.accumulate) return; // nothing is added there
  if (p.seqused_k) clear_unused(p, p.dk, p.head_dim), clear_unused(p, p.dv, p.head_dim_v);
  if (!p.varlen) return;
  const int64_t end = p.cu_seqlens_k[p.batch];
  clear(p.dk, p.heads_kv, p.head_dim, end, p.total_k);
  clear(p.dv, p.heads_kv, p.head_dim_v, end, p.total_k);
}

void clear_padding_of_queries(const Problem &p, Direction direction) {
  if (!p.varlen) return;
  const int64_t end_q = p.cu_seqlens_q[p.batch];
  if (direction == Direction::backward && p.accumulate) return;
  if (direction == Direction::backward) return clear(p.dq, p.heads, p.head_dim, end_q, p.total_q);
  clear(p.out, p.heads, p.head_dim_v, end_q, p.total_q);
  if (!p.lse) return;
  if (p.part.partial) {
    View low = p.lse;
    low.data += p.lse_low * bytes(low.dtype);
    clear(low, p.heads, 1, end_q, p.total_q);
  }
  if (p.lse.dtype == DType::f64)
    fill(p.lse, p.heads, 1, end_q, p.total_q, -std::numeric_limits<double>::infinity());
  else
    fill(p.lse, p.heads, 1, end_q, p.total_q, -std::numeric_limits<float>::infinity());
}

} // namespace strobe
