// Causal attention through strobe.hpp, forward and backward, against plain loops.
#include <strobe/strobe.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

constexpr size_t kHeads = 2, kQueries = 37, kKeys = 53, kDim = 8;

// One head in float64: out and the gradient of sum(out * dout) with respect to v.
static void plain(const float *q, const float *k, const float *v, const float *dout, double *out, double *dv) {
  for (size_t i = 0; i < kQueries; i++) {
    const size_t visible = i + kKeys - kQueries + 1;
    std::vector<double> p(visible);
    for (size_t j = 0; j < visible; j++) {
      double s = 0;
      for (size_t c = 0; c < kDim; c++) s += double(q[i * kDim + c]) * k[j * kDim + c];
      p[j] = std::exp(s / std::sqrt(double(kDim)));
    }
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (size_t j = 0; j < visible; j++)
      for (size_t c = 0; c < kDim; c++) {
        out[i * kDim + c] += p[j] / sum * v[j * kDim + c];
        dv[j * kDim + c] += p[j] / sum * dout[i * kDim + c];
      }
  }
}

static double worst(const std::vector<float> &x, const std::vector<double> &expected) {
  double worst = 0;
  for (size_t n = 0; n < x.size(); n++) worst = std::max(worst, std::abs(x[n] - expected[n]));
  return worst;
}

int main() {
  auto waves = [](size_t n, double step) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) x[i] = static_cast<float>(std::sin(step * double(i + 1)));
    return x;
  };
  const strobe::Shape queries = {1, kHeads, kQueries, kDim}, keys = {1, kHeads, kKeys, kDim}, rows = {1, kHeads, kQueries};
  const auto q = waves(kHeads * kQueries * kDim, 0.7), k = waves(kHeads * kKeys * kDim, 1.3), v = waves(k.size(), 2.1),
             dout = waves(q.size(), 0.3);
  std::vector<float> out(q.size()), lse(kHeads * kQueries), dv(v.size());

  const strobe::Attention attention = {.q = {q, queries}, .k = {k, keys}, .v = {v, keys}, .causal = true};
  strobe::forward(attention, {.out = {out, queries}, .lse = {lse, rows}});
  strobe::backward(attention, {.out = {out, queries}, .lse = {lse, rows}, .dout = {dout, queries}, .dv = {dv, keys}});

  std::vector<double> expected(out.size()), expected_dv(dv.size());
  for (size_t h = 0; h < kHeads; h++) {
    const size_t at_q = h * kQueries * kDim, at_k = h * kKeys * kDim;
    plain(&q[at_q], &k[at_k], &v[at_k], &dout[at_q], &expected[at_q], &expected_dv[at_k]);
  }
  const double error = worst(out, expected), error_dv = worst(dv, expected_dv);
  std::printf("out differs by at most %.2g, dv by %.2g\n%s", error, error_dv,
              strobe::explain(attention, strobe::Forward{.out = {out, queries}}).c_str());

  // Prepared once, run on memory of the same shapes.
  const auto other_v = waves(v.size(), 1.7);
  std::vector<float> from_prepared(q.size()), from_whole(q.size());
  const strobe::Prepared prepared(attention, strobe::Forward{.out = {out, queries}});
  strobe_addresses addresses{};
  addresses.q = const_cast<float *>(q.data()), addresses.k = const_cast<float *>(k.data());
  addresses.v = const_cast<float *>(other_v.data()), addresses.out = from_prepared.data();
  prepared.run(addresses);
  strobe::forward({.q = {q, queries}, .k = {k, keys}, .v = {other_v, keys}, .causal = true}, {.out = {from_whole, queries}});
  const bool same = from_prepared == from_whole && std::string(prepared.plan().engine).starts_with("cpu-");

  auto refused_for = [&](const strobe::Attention &wrong, const char *reason) {
    try {
      strobe::forward(wrong, {.out = {out, queries}});
    } catch (const strobe::InvalidArgument &e) {
      const strobe::Refusal &first = e.refusals.at(0);
      return std::string(e.what()).starts_with(reason) && std::string(reason).starts_with(first.argument + ": ") && !first.words.empty();
    }
    return false;
  };
  const std::vector<float> half(v.size() / 2);
  const bool refused =
      refused_for({.q = {q, queries}, .k = {k, keys}}, "v: missing") &&
      refused_for({.q = {q, queries}, .k = {k, keys}, .v = {half, keys}}, "v: a range of 424 elements; accepted are 848 or more");

  // Each engine's name comes once. The ladder's rungs have a form for each device; the form for the CPU runs everywhere.
  std::vector<std::string> names;
  bool rung_runs = false;
  for (const strobe::EngineInfo &engine : strobe::engines()) {
    names.push_back(engine.name);
    rung_runs |= engine.name == "ladder-naive" && !engine.missing;
  }
  std::ranges::sort(names);
  const bool listed = rung_runs && std::ranges::adjacent_find(names) == names.end() && std::ranges::binary_search(names, "reference");
  return error < 1e-6 && error_dv < 1e-6 * kQueries && same && refused && listed ? 0 : 1;
}
