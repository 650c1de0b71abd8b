#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "attention/refusal.h"
#include "reference/function.h"
#include "reference/numbers.h"
#include "reference/philox.h"

namespace strobe {
namespace {

using oracle::Dropout;
using oracle::load;
using oracle::Tangent;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Vector = std::vector<double>;

// A row of numbers and, if there are any, their tangents.
struct Numbers {
  const double *value, *tangent = nullptr;
};

double dot(const double *x, const double *y, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; c++) sum += x[c] * y[c];
  return sum;
}
Tangent dot(Numbers x, Numbers y, int64_t n) {
  return {dot(x.value, y.value, n), (x.tangent ? dot(x.tangent, y.value, n) : 0) + (y.tangent ? dot(x.value, y.tangent, n) : 0)};
}

// A row of sums, with their tangents if the call has any.
struct Sums {
  Vector value, tangent;
  Sums(int64_t columns, bool tangents) : value(size_t(columns)), tangent(size_t(tangents ? columns : 0)) {}
  Numbers numbers() const { return {value.data(), tangent.empty() ? nullptr : tangent.data()}; }
  void add(Tangent factor, Numbers x) {
    for (size_t c = 0; c < value.size(); c++) value[c] += factor.value * x.value[c];
    for (size_t c = 0; c < tangent.size(); c++) tangent[c] += factor.tangent * x.value[c];
    if (x.tangent)
      for (size_t c = 0; c < tangent.size(); c++) tangent[c] += factor.value * x.tangent[c];
  }
};

// ---- one head of one sequence ----------------------------------------------------------------------------------------------------------

// The tokens [begin, begin + length) of sequence b. In dense tensors begin is 0, because sequences have a batch axis.
struct Tokens {
  int64_t begin, length;
};
Tokens queries(const Problem &p, int64_t b) {
  return p.varlen ? Tokens{p.cu_seqlens_q[b], p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b]} : Tokens{0, p.seqlen_q};
}
Tokens held_keys(const Problem &p, int64_t b) {
  return p.packed_k() ? Tokens{p.cu_seqlens_k[b], p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]} : Tokens{0, p.seqlen_k};
}
Tokens keys(const Problem &p, int64_t b) {
  Tokens t = held_keys(p, b);
  if (p.seqused_k) t.length = p.seqused_k[b]; // already checked
  return t;
}

// The position of each token within its whole sequence.
std::vector<int64_t> places(const RowRange *ranges, int64_t sequences, int64_t count, int64_t b, Tokens t) {
  std::vector<int64_t> at(size_t(t.length), 0);
  if (!ranges) {
    std::iota(at.begin(), at.end(), 0);
    return at;
  }
  size_t next = 0;
  for (const RowRange *range = ranges + (sequences > 1 ? b : 0) * count; next < at.size(); range++)
    for (int64_t n = 0; n < range->length; n++) at[next++] = range->start + n;
  return at;
}
int64_t whole(const int64_t *lengths, int64_t sequences, int64_t b, Tokens t) {
  return lengths ? lengths[sequences > 1 ? b : 0] : t.length;
}

// The (tokens, columns) of one head, in double, and their tangents.
class Matrix {
public:
  Matrix(const View &x, const View &tangents, int64_t b, int64_t h, Tokens t, int64_t columns, const Scales &scales = {})
      : columns(columns), values(loaded(x, b, h, t, columns, scales)), tangents(loaded(tangents, b, h, t, columns, {})) {}
  Numbers operator[](int64_t i) const { return {values.data() + i * columns, tangents.empty() ? nullptr : tangents.data() + i * columns}; }

private:
  static Vector loaded(const View &x, int64_t b, int64_t h, Tokens t, int64_t columns, const Scales &scales) {
    Vector values(x ? size_t(t.length * columns) : 0);
    for (size_t n = 0; n < values.size(); n++) values[n] = load(x, scales, b, h, t.begin + int64_t(n) / columns, int64_t(n) % columns);
    return values;
  }

  int64_t columns;
  Vector values, tangents;
};

// P = exp(s - LSE) of one row. The maximum and the sum are kept apart, so that the rounding of LSE does not enter P.
struct Softmax {
  double max = 0;
  Tangent sum; // for a row that sees no key, LSE = log 0 = -inf and P = 0
  Tangent lse() const { return sum.value == 0 ? Tangent(-kInfinity) : max + log(sum); }
  Tangent operator()(Tangent s) const { return sum.value == 0 || s.value == -kInfinity ? 0 : exp(s - max) / sum; }
};

struct Score {
  Tangent s;     // -inf where the query does not see the key
  Tangent slope; // ds / d(scale q.k)
};

// The statistics of a row that the backward needs.
struct Row {
  Softmax softmax;
  Tangent D, dlse;
};

struct Gradient {
  Tangent P; // after dropout
  Tangent dS, dx;
};

struct Head {
  const Problem &p;
  const bool tangents; // whether the call has tangents
  const int64_t b, h, h_kv;
  const Tokens q, k;
  const std::vector<int64_t> place_q, place_k;
  const int64_t offset;
  const double slope;
  const Tangent sink;
  const Dropout dropout;
  const oracle::Function function, seen;
  const Matrix Q, K, V, dO;

  Head(const Problem &p, int64_t b, int64_t h, bool tangents)
      : p(p), tangents(tangents), b(b), h(h), h_kv(h / p.group()), q(queries(p, b)), k(keys(p, b)),
        place_q(places(p.part.q, p.part.batch_q, p.part.count_q, b, q)), place_k(places(p.part.k, p.part.batch_k, p.part.count_k, b, k)),
        offset(p.bottom_right ? whole(p.part.seqlens_k, p.part.batch_lens_k, b, k) - whole(p.part.seqlens_q, p.part.batch_lens_q, b, q)
                              : 0),
        slope(p.alibi_slopes ? load(p.alibi_slopes, b, h, 0, 0) : 0),
        sink(p.sinks ? Tangent(load(p.sinks, 0, h, 0, 0), p.tsinks ? load(p.tsinks, 0, h, 0, 0) : 0) : -kInfinity),
        dropout(p.dropout, p.rng ? uint64_t(p.rng[0]) : p.seed, p.rng ? uint64_t(p.rng[1]) : p.offset), function(score_of(p)),
        seen(p.program ? made(p, p.program->graph, p.program->seen) : oracle::Function({}, -1, nullptr, nullptr)),
        Q(p.q, p.tq, b, h, q, p.head_dim), K(p.k, p.tk, b, h_kv, k, p.head_dim, p.k_scale),
        V(p.v, p.tv, b, h_kv, k, p.head_dim_v, p.v_scale), dO(p.dout, p.tdout, b, h, q, p.head_dim_v) {}

  static oracle::Function made(const Problem &p, const score::Graph &graph, int32_t root) {
    return oracle::Function(graph.nodes(), root, p.captured, p.tcaptured);
  }
  // The caller's own graph, also where engines compute a built-in form instead.
  static oracle::Function score_of(const Problem &p) {
    if (!p.program) return oracle::Function({}, -1, nullptr, nullptr);
    const score::Program &program = *p.program;
    return program.given ? made(p, *program.given, program.given_score) : made(p, program.graph, program.score);
  }

  // How far key j lies before query i.
  int64_t behind(int64_t i, int64_t j) const { return place_q[i] + offset - place_k[j]; }

  bool visible(int64_t i, int64_t j) const {
    return behind(i, j) <= p.window_left && -behind(i, j) <= p.window_right && (!p.mask || *p.mask.at<uint8_t>(b, h, i, place_k[j])) &&
           (!p.bias || load(p.bias, b, h, i, place_k[j]) != -kInfinity) && in_kept_block(place_q[i], place_k[j]) &&
           (!seen || seen.boolean(pair(i, j)));
  }

  // The arguments of the caller's functions.
  oracle::Pair pair(int64_t i, int64_t j, Tangent x = 0) const {
    return {x, p.part.first_batch + b, p.part.first_head + h, place_q[i], place_k[j], offset};
  }

  bool in_kept_block(int64_t i, int64_t j) const {
    const auto &blocks = p.blocks;
    if (!blocks.present) return true;
    const int64_t matrix = (blocks.batch > 1 ? p.part.first_batch + b : 0) * blocks.heads + (blocks.heads > 1 ? p.part.first_head + h : 0);
    const int32_t *row = blocks.row_ptr + matrix * (blocks.rows + 1) + i / blocks.block_q;
    return std::binary_search(blocks.col + row[0], blocks.col + row[1], j / blocks.block_k);
  }

  Score score(int64_t i, int64_t j) const {
    if (!visible(i, j)) return {-kInfinity, 0};
    Tangent s = p.scale * dot(Q[i], K[j], p.head_dim), ds = 1;
    if (function) {
      oracle::Dual f = function.real(pair(i, j, s));
      // however the caller's graph computes arccosh(max(-x, 1))
      if (p.program->form == score::Form::hyperbolic && -s.value <= 1) f.slope = 0, f.value.tangent = 0;
      if (f.value.value == -kInfinity) return {-kInfinity, 0};
      s = f.value, ds = f.slope;
    }
    if (p.alibi_slopes) s += -slope * double(std::abs(behind(i, j)));
    if (p.bias) s += Tangent(load(p.bias, b, h, i, place_k[j]), p.tbias ? load(p.tbias, b, h, i, place_k[j]) : 0);
    if (s.value == -kInfinity) s.tangent = 0;
    return {s, ds};
  }

  std::vector<Score> scores(int64_t i) const {
    std::vector<Score> row;
    for (int64_t j = 0; j < k.length; j++) row.push_back(score(i, j));
    return row;
  }

  Softmax softmax(const std::vector<Score> &row) const {
    double max = sink.value;
    Tangent sum = 0;
    for (const Score &x : row) max = std::max(max, x.s.value);
    if (max == -kInfinity) max = 0; // the query sees no key: every term below is 0, or NaN if a score is NaN
    for (const Score &x : row) sum += exp(x.s - max);
    return {max, sum + exp(sink - max)};
  }

  double kept(int64_t i, int64_t j) const { return dropout.factor(p.part.first_batch + b, p.part.first_head + h, place_q[i], place_k[j]); }

  Sums output(int64_t i, const std::vector<Score> &row, const Softmax &P) const {
    Sums O(p.head_dim_v, tangents);
    for (int64_t j = 0; j < k.length; j++)
      if (row[j].s.value != -kInfinity) O.add(P(row[j].s) * kept(i, j), V[j]);
    return O;
  }

  Tangent dlse(int64_t i) const {
    return {p.dlse ? load(p.dlse, b, h, q.begin + i, 0) : 0, p.tdlse ? load(p.tdlse, b, h, q.begin + i, 0) : 0};
  }

  Row row(int64_t i, const std::vector<Score> &scores) const {
    if (p.part.partial) return given_row(i);
    const Softmax P = softmax(scores);
    return {P, dot(dO[i], output(i, scores, P).numbers(), p.head_dim_v), dlse(i)};
  }

  // A row's statistics from the caller's LSE and O, or LSE and D.
  Row given_row(int64_t i) const {
    double lse = load(p.lse, b, h, q.begin + i, 0);
    if (p.part.partial) {
      View low = p.lse;
      low.data += p.lse_low * bytes(low.dtype);
      if (std::isfinite(lse)) lse += load(low, b, h, q.begin + i, 0);
      return {{lse, lse == -kInfinity ? 0.0 : 1.0}, load(p.delta, b, h, q.begin + i, 0), dlse(i)};
    }
    double D = 0;
    for (int64_t c = 0; c < p.head_dim_v; c++) D += dO[i].value[c] * load(p.out, b, h, q.begin + i, c);
    return {{lse, 1}, D, dlse(i)};
  }

  Gradient gradient(int64_t i, int64_t j, const Score &x, const Row &r) const {
    const double keep = kept(i, j);
    const Tangent P = r.softmax(x.s), dP = keep * dot(dO[i], V[j], p.head_dim_v);
    const Tangent dS = P * (dP - r.D + r.dlse);
    return {P * keep, dS, dS * x.slope};
  }
};

// ---- selections ------------------------------------------------------------------------------------------------------------------------

// A selection as ascending flat indices, copied for the call. If it is absent, everything is selected.
struct Indices {
  std::optional<std::vector<int64_t>> flat;
  explicit operator bool() const { return flat.has_value(); }

  // The selected indices in [first, first + length), minus `first`.
  std::vector<int64_t> within(int64_t first, int64_t length) const {
    if (!*this) {
      std::vector<int64_t> all(size_t(length), 0);
      std::iota(all.begin(), all.end(), 0);
      return all;
    }
    const auto from = std::lower_bound(flat->begin(), flat->end(), first);
    std::vector<int64_t> chosen(from, std::lower_bound(from, flat->end(), first + length));
    for (int64_t &x : chosen) x -= first;
    return chosen;
  }
};

Indices checked(const char *argument, const int64_t *indices, int64_t count, int64_t limit) {
  if (count < 0 || (count > 0 && !indices))
    refuse(argument, Code::value,
           indices ? "{0} indices; accepted is an array and its length, or null and 0 for all"
                   : "{0} indices at a null pointer; accepted is an array and its length, or null and 0 for all",
           count);
  if (!indices) return {};
  if (count > limit)
    refuse(argument, Code::value, "{0} indices; accepted are flat indices from 0 to {1}, strictly ascending", count, limit - 1);
  std::vector<int64_t> own(indices, indices + count);
  for (int64_t n = 0; n < count; n++)
    if (own[n] < 0 || own[n] >= limit || (n > 0 && own[n] <= own[n - 1]))
      refuse(argument, Code::list,
             n ? "[{0}] is {1} after {2}; accepted are flat indices from 0 to {3}, strictly ascending"
               : "[{0}] is {1}; accepted are flat indices from 0 to {3}, strictly ascending",
             n, own[n], n ? own[n - 1] : 0, limit - 1);
  return {std::move(own)};
}

// ---- the passes: each owns its outputs, so the result does not depend on the threads ---------------------------------------------------

class Reference {
public:
  Reference(const Problem &p, const Execution &execution, Operation operation, const strobe_selection *selection)
      : p(p), execution(execution), tangents(reads(operation, kTangents)) {
    if (!selection) return;
    const int64_t tokens_q = p.varlen ? p.total_q : p.batch * p.seqlen_q, tokens_k = p.varlen ? p.total_k : p.batch * p.seqlen_k;
    rows = checked("rows", selection->rows, selection->n_rows, tokens_q * p.heads);
    cols = checked("cols", selection->cols, selection->n_cols, tokens_k * p.heads_kv);
    if (!writes(operation, kGradients) && cols)
      refuse("cols", Code::excluded, "given in forward; accepted is {0}, for they are those of dk and dv", Absent{"null"});
    if (rows && p.auxiliary())
      refuse(p.max_logit ? "max_logit" : "column_sums", Code::excluded,
             "given with {0}; accepted is {1}, for all rows of a head belong to it", Argument{"rows"}, Absent{"null"});
    const char *over_all_rows = p.dbias ? "dbias" : p.dsinks ? "dsinks" : nullptr;
#define STROBE_DCAPTURED(name, place)                                                                                                      \
  if (p.place && !over_all_rows) over_all_rows = #name;
#include "strobe/fields.inc"
    if (writes(operation, kGradients) && rows && over_all_rows)
      refuse(over_all_rows, Code::excluded, "given with {0}; accepted is {1}, for it is a sum over all rows", Argument{"rows"},
             Absent{"null"});
  }

  void forward() const {
    each(p.batch * p.heads, [&](int64_t n) { forward(n / p.heads, n % p.heads); });
  }

  void backward() const {
    if (p.dq) each(p.batch * p.heads, [&](int64_t n) { rows_of_dq(n / p.heads, n % p.heads); });
    if (p.dk || p.dv) each(p.batch * p.heads_kv, [&](int64_t n) { columns_of_dk_dv(n / p.heads_kv, n % p.heads_kv); });
    if (p.dbias) {
      const int64_t batch = p.dbias.stride[0] ? p.batch : 1, heads = p.dbias.stride[1] ? p.heads : 1;
      each(batch * heads, [&](int64_t n) { matrix_of_dbias(n / heads, n % heads); });
    }
    if (p.dsinks) each(p.heads, [&](int64_t h) { entry_of_dsinks(h); });
    each(STROBE_MOST_CAPTURED, [&](int64_t n) {
      if (p.dcaptured[n]) elements_of_dcaptured(n);
    });
  }

private:
  template <class F> void each(int64_t n, F &&f) const {
    const int32_t shares = int32_t(std::min<int64_t>(n, std::numeric_limits<int32_t>::max()));
    execution.run(shares, [&](int32_t share) {
      for (int64_t i = share; i < n; i += shares) f(i);
    });
  }

  // seqlen: the length of the sequences in dense tensors; total: the number of packed tokens.
  std::vector<int64_t> selected(const Indices &indices, int64_t b, int64_t h, int64_t heads, Tokens t, int64_t seqlen,
                                int64_t total) const {
    return indices.within(p.varlen ? h * total + t.begin : (b * heads + h) * seqlen, t.length);
  }

  void forward(int64_t b, int64_t h) const {
    const auto chosen = selected(rows, b, h, p.heads, queries(p, b), p.seqlen_q, p.total_q);
    if (chosen.empty() && !p.auxiliary()) return;
    const Head head(p, b, h, tangents);
    double most = -kInfinity;
    Vector columns(size_t(p.column_sums ? head.k.length : 0));
    for (const int64_t i : chosen) {
      const auto scores = head.scores(i);
      const Softmax P = head.softmax(scores);
      const Sums O = head.output(i, scores, P);
      write(p.out, b, h, head.q.begin + i, O.value);
      write(p.tout, b, h, head.q.begin + i, O.tangent);
      if (p.lse) *p.lse.at<double>(b, h, head.q.begin + i, 0) = P.lse().value;
      if (p.tlse) *p.tlse.at<double>(b, h, head.q.begin + i, 0) = P.lse().tangent;
      if (p.lse && p.part.partial) p.lse.at<double>(b, h, head.q.begin + i, 0)[p.lse_low] = 0; // the first number is exact enough
      for (const Score &x : scores)
        if (x.s.value > most || std::isnan(x.s.value)) most = x.s.value; // a NaN stays, because nothing is larger
      for (size_t j = 0; j < columns.size(); j++)
        if (scores[j].s.value != -kInfinity) columns[j] += P(scores[j].s).value;
    }
    if (p.max_logit) *p.max_logit.at<double>(b, h, 0, 0) = most;
    for (size_t j = 0; j < columns.size(); j++) *p.column_sums.at<double>(b, h, head.k.begin + int64_t(j), 0) = columns[j];
  }

  // dQ_i = scale sum_j dx_ij K_j
  void rows_of_dq(int64_t b, int64_t h) const {
    const auto chosen = selected(rows, b, h, p.heads, queries(p, b), p.seqlen_q, p.total_q);
    if (chosen.empty()) return;
    const Head head(p, b, h, tangents);
    for (const int64_t i : chosen) {
      Sums dQ(p.head_dim, tangents);
      each_gradient(head, i, [&](int64_t j, const Gradient &g) { dQ.add(p.scale * g.dx, head.K[j]); });
      write(p.dq, b, h, head.q.begin + i, wanted(dQ));
    }
  }

  // dK_j = scale sum_i dx_ij Q_i, dV_j = sum_i P_ij dO_i, over all query heads of the key head
  void columns_of_dk_dv(int64_t b, int64_t h_kv) const {
    const Tokens k = keys(p, b);
    const auto chosen = selected(cols, b, h_kv, p.heads_kv, held_keys(p, b), p.seqlen_k, p.total_k); // keys that do not count get 0
    if (chosen.empty()) return;
    const bool given = cols && p.lse && p.out && !tangents;
    std::vector<Sums> dK(chosen.size(), Sums(p.head_dim, tangents)), dV(chosen.size(), Sums(p.head_dim_v, tangents));
    for (int64_t h = h_kv * p.group(); h < (h_kv + 1) * p.group(); h++) {
      const Head head(p, b, h, tangents);
      for (int64_t i = 0; i < head.q.length; i++) {
        std::optional<Row> row; // set once the query sees a chosen column
        for (size_t n = 0; n < chosen.size() && chosen[n] < k.length; n++) {
          const Score score = head.score(i, chosen[n]);
          if (score.s.value == -kInfinity) continue;
          if (!row) row = given ? head.given_row(i) : head.row(i, head.scores(i));
          const Gradient g = head.gradient(i, chosen[n], score, *row);
          dK[n].add(p.scale * g.dx, head.Q[i]);
          dV[n].add(g.P, head.dO[i]);
        }
      }
    }
    for (size_t n = 0; n < chosen.size(); n++) {
      write(p.dk, b, h_kv, k.begin + chosen[n], wanted(dK[n]));
      write(p.dv, b, h_kv, k.begin + chosen[n], wanted(dV[n]));
    }
  }

  // dbias = dS, summed over the axes that dbias lacks (stride 0). (b, h): the place in dbias.
  void matrix_of_dbias(int64_t b, int64_t h) const {
    const bool all_b = !p.dbias.stride[0], all_h = !p.dbias.stride[1], all_i = !p.dbias.stride[2], all_j = !p.dbias.stride[3];
    const int64_t n_i = all_i ? 1 : p.seqlen_q, n_j = all_j ? 1 : p.size_k();
    Vector sum(size_t(n_i * n_j));
    for (int64_t batch = all_b ? 0 : b; batch < (all_b ? p.batch : b + 1); batch++)
      for (int64_t query_head = all_h ? 0 : h; query_head < (all_h ? p.heads : h + 1); query_head++) {
        const Head head(p, batch, query_head, tangents);
        for (int64_t i = 0; i < head.q.length; i++)
          each_gradient(head, i, [&](int64_t j, const Gradient &g) {
            sum[size_t((all_i ? 0 : i * n_j) + (all_j ? 0 : head.place_k[j]))] += wanted(g.dS);
          });
      }
    for (int64_t i = 0; i < n_i; i++)
      for (int64_t j = 0; j < n_j; j++) *p.dbias.at<double>(b, h, i, j) = sum[size_t(i * n_j + j)];
  }

  // dsink_h = sum_i exp(sink_h - LSE_i) (dLSE_i - D_i)
  void entry_of_dsinks(int64_t h) const {
    double sum = 0;
    for (int64_t b = 0; b < p.batch; b++) {
      const Head head(p, b, h, tangents);
      for (int64_t i = 0; i < head.q.length; i++) {
        const Row r = head.row(i, head.scores(i));
        sum += wanted(r.softmax(head.sink) * (r.dlse - r.D));
      }
    }
    *p.dsinks.at<double>(0, h, 0, 0) = sum;
  }

  // dcaptured_e = sum over the LOADs of this tensor, and over the pairs for which they read element e, of dS df / d(what was read). A pair
  // without dS adds nothing, whatever the derivative is.
  void elements_of_dcaptured(int64_t n) const {
    const Captured &to = p.dcaptured[n];
    Vector sum(size_t(to.size[0] * to.size[1] * to.size[2] * to.size[3]));
    for (int32_t load = 0; p.program && load <= p.program->score; load++) {
      const auto &nodes = p.program->graph.nodes();
      if (nodes[size_t(load)].op != score::Op::LOAD || nodes[size_t(load)].captured != n) continue;
      const oracle::Function function(nodes, p.program->score, p.captured, p.tcaptured, load);
      if (!function.uses_load()) continue; // the mask alone reads it
      for (int64_t b = 0; b < p.batch; b++)
        for (int64_t h = 0; h < p.heads; h++) {
          const Head head(p, b, h, tangents);
          for (int64_t i = 0; i < head.q.length; i++)
            each_gradient(head, i, [&](int64_t j, const Gradient &g) {
              if (g.dS.value == 0 && g.dS.tangent == 0) return;
              const Tangent slope = function.real(head.pair(i, j, p.scale * dot(head.Q[i], head.K[j], p.head_dim))).slope;
              sum[size_t(function.place())] += wanted(g.dS * slope);
            });
        }
    }
    for (size_t e = 0; e < sum.size(); e++) {
      int64_t rest = int64_t(e), place = 0;
      for (int32_t axis = to.rank; axis-- > 0; rest /= to.size[axis]) place += rest % to.size[axis] * to.stride[axis];
      reinterpret_cast<double *>(to.data)[place] = sum[e];
    }
  }

  // Calls f(j, gradient) for each key j that query i sees.
  template <class F> void each_gradient(const Head &head, int64_t i, F &&f) const {
    const auto scores = head.scores(i);
    const Row row = head.row(i, scores);
    for (int64_t j = 0; j < head.k.length; j++)
      if (scores[j].s.value != -kInfinity) f(j, head.gradient(i, j, scores[j], row));
  }

  // What the operation writes: a gradient, or its derivative in the direction of the tangents.
  const Vector &wanted(const Sums &x) const { return tangents ? x.tangent : x.value; }
  double wanted(Tangent x) const { return tangents ? x.tangent : x.value; }

  void write(const View &x, int64_t b, int64_t h, int64_t i, const Vector &values) const {
    if (!x) return;
    for (size_t c = 0; c < values.size(); c++) {
      if (x.dtype == DType::f32) { // gradients that are added to those of the caller
        float &to = *x.at<float>(b, h, i, int64_t(c));
        to = float(to + values[c]);
      } else {
        double &to = *x.at<double>(b, h, i, int64_t(c));
        to = p.accumulate ? to + values[c] : values[c];
      }
    }
  }

  const Problem &p;
  const Execution &execution;
  const bool tangents;
  Indices rows, cols;
};

class ReferenceEngine final : public Engine {
public:
  const char *name() const override { return "reference"; }
  std::string missing() const override { return {}; }
  bool only_by_name() const override { return true; }
  bool computes(Operation) const override { return true; }

  Answer plan(const Problem &p, const Execution &, Operation operation) const override {
    Plan plan;
    plan.engine = name();
    plan.kernel = "the formulas in fp64, row by row";
    plan.tile_q = 1;
    plan.tile_k = p.seqlen_k;
    // About one multiply-add per nanosecond. The backward computes the forward again for each gradient.
    const double scores = double(p.batch) * double(p.heads) * double(p.seqlen_q) * double(p.seqlen_k);
    plan.predicted_seconds = 1e-9 * scores * double(p.head_dim + p.head_dim_v) * (writes(operation, kGradients) ? 5 : 1);
    if (p.wishes.tile_q || p.wishes.tile_k) plan.notes.push_back("tile_q, tile_k: no tiles here, each row is computed whole");
    return plan;
  }

  void run(const Problem &p, const Execution &execution, Operation operation, const Plan &, void *) const override {
    reference(p, execution, operation, nullptr);
  }
};

} // namespace

void reference(const Problem &p, const Execution &execution, Operation operation, const strobe_selection *selection) {
  const Reference oracle(p, execution, operation, selection);
  writes(operation, kGradients) ? oracle.backward() : oracle.forward();
}

const Engine *reference_engine() {
  static const ReferenceEngine engine;
  return &engine;
}

} // namespace strobe
