// The oracle by itself: its Philox, its 16-bit floats, its gradients against finite differences, its selections.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <random>

#include "reference/numbers.h"
#include "reference/philox.h"
#include "reference/reference.h"
#include "score/build.h"

using namespace strobe;

TEST_CASE("reference: Philox4x32-7 gives Random123's published vectors") {
  struct Known {
    oracle::Counter counter;
    oracle::Key key;
    oracle::Counter result;
  };
  const uint32_t ff = 0xFFFFFFFF;
  const Known known[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{ff, ff, ff, ff}, {ff, ff}, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
  };
  for (const Known &k : known) CHECK(oracle::philox4x32_7(k.counter, k.key) == k.result);
}

TEST_CASE("reference: mix64 is splitmix64's finaliser") { CHECK(oracle::mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF); }

TEST_CASE("reference: each byte of a 16 x 16 block's Philox calls belongs to one element") {
  const uint64_t seed = 123, offset = 45;
  const uint64_t x = oracle::mix64(seed + 0x9E3779B97F4A7C15 * (oracle::mix64(offset) | 1));
  const oracle::Key key = {uint32_t(x), uint32_t(x >> 32)};
  const oracle::Dropout dropout(0.5, seed, offset);
  const uint32_t b = 2, h = 3, query_block = 5, key_block = 1;

  std::map<uint32_t, int> drawn, used;
  for (uint32_t group_q = 0; group_q < 4; group_q++)
    for (uint32_t group_k = 0; group_k < 4; group_k++)
      for (uint32_t word : oracle::philox4x32_7({4 * key_block + group_k, 4 * query_block + group_q, h, b}, key))
        for (int byte = 0; byte < 4; byte++) drawn[word >> (8 * byte) & 255]++;
  for (int64_t i = 0; i < 16; i++)
    for (int64_t j = 0; j < 16; j++) used[dropout.byte(b, h, 16 * query_block + i, 16 * key_block + j)]++;
  CHECK(used == drawn);

  // Query 9 = 1001b: pair 0, slot 3. Key 22 = 16 + 0110b: pair 3, slot 0.
  CHECK(dropout.byte(b, h, 9, 22) == (oracle::philox4x32_7({7, 0, 3, 2}, key)[3] & 255));
  // Query 6 = 0110b: pair 3, slot 0. Key 11 = 1011b: pair 1, slot 3.
  CHECK(dropout.byte(b, h, 6, 11) == oracle::philox4x32_7({1, 3, 3, 2}, key)[0] >> 24);
  // The numbers of groups wrap at 2^32.
  CHECK(dropout.byte(b, h, (int64_t{1} << 34) + 9, 22) == dropout.byte(b, h, 9, 22));
}

TEST_CASE("reference: the dropout rate is quantised to 1/256 and the kept are scaled by it") {
  struct Rate {
    double probability;
    int threshold;
  };
  for (const Rate &rate : {Rate{0.5, 128}, {0.1, 230}, {0.999, 1}, {1e-4, 255}}) {
    const oracle::Dropout dropout(rate.probability, 1, 2);
    int kept = 0;
    const int n = 256;
    for (int i = 0; i < n; i++)
      for (int j = 0; j < n; j++) {
        const bool keep = int(dropout.byte(0, 0, i, j)) < rate.threshold;
        CHECK(dropout.factor(0, 0, i, j) == (keep ? 256.0 / rate.threshold : 0.0));
        kept += keep;
      }
    const double p = rate.threshold / 256.0;
    CHECK(std::abs(kept - p * n * n) < 5 * std::sqrt(p * (1 - p)) * n);
  }
  CHECK(oracle::Dropout(0, 1, 2).factor(0, 0, 3, 4) == 1);
}

TEST_CASE("reference: 16-bit floats") {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    const float upper_half = std::bit_cast<float>(bits << 16);
    const double x = oracle::bfloat(uint16_t(bits));
    if (std::isnan(upper_half))
      CHECK(std::isnan(x));
    else
      CHECK(std::bit_cast<uint64_t>(x) == std::bit_cast<uint64_t>(double(upper_half)));
  }
  CHECK(oracle::half(0x3C00) == 1);
  CHECK(oracle::half(0xC000) == -2);
  CHECK(oracle::half(0x3555) == 0.333251953125);
  CHECK(oracle::half(0x7BFF) == 65504);
  CHECK(oracle::half(0x0400) == std::ldexp(1, -14));
  CHECK(oracle::half(0x83FF) == -std::ldexp(1023, -24));
  CHECK(oracle::half(0x0001) == std::ldexp(1, -24));
  CHECK(std::signbit(oracle::half(0x8000)));
  CHECK(oracle::half(0xFC00) == -std::numeric_limits<double>::infinity());
  CHECK(std::isnan(oracle::half(0x7C01)));
}

namespace {

// A dense tensor (batch, head, row, column) and its view. An axis of size 1 is broadcast.
struct Tensor {
  int64_t shape[4];
  std::vector<double> values;

  Tensor(int64_t b, int64_t h, int64_t i, int64_t c) : shape{b, h, i, c}, values(size_t(b * h * i * c)) {}
  Tensor &random(std::mt19937 &generator) {
    std::normal_distribution<double> normal;
    for (double &x : values) x = normal(generator);
    return *this;
  }
  Tensor &fill(double x) {
    std::fill(values.begin(), values.end(), x);
    return *this;
  }
  View view() {
    View v;
    v.data = reinterpret_cast<char *>(values.data());
    v.dtype = DType::f64;
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; stride *= shape[axis--]) v.stride[axis] = shape[axis] == 1 ? 0 : stride;
    return v;
  }
};

// All features together: GQA, D != Dv, a causal window, softcap, ALiBi, bias, mask, sinks, dropout and blocks. Some rows see no key.
struct Example {
  static constexpr int64_t B = 2, H = 4, H_kv = 2, Sq = 21, Sk = 37, D = 3, Dv = 2;
  std::mt19937 generator{7};
  Tensor q = Tensor(B, H, Sq, D).random(generator), k = Tensor(B, H_kv, Sk, D).random(generator),
         v = Tensor(B, H_kv, Sk, Dv).random(generator);
  Tensor bias = Tensor(1, H, Sq, 1).random(generator), slopes = Tensor(B, H, 1, 1).random(generator),
         sinks = Tensor(1, H, 1, 1).random(generator);
  Tensor out{B, H, Sq, Dv}, lse{B, H, Sq, 1};
  Tensor dout = Tensor(B, H, Sq, Dv).random(generator), dlse = Tensor(B, H, Sq, 1).random(generator);
  Tensor dq{B, H, Sq, D}, dk{B, H_kv, Sk, D}, dv{B, H_kv, Sk, Dv}, dbias{1, H, Sq, 1}, dsinks{1, H, 1, 1};
  std::vector<uint8_t> mask = std::vector<uint8_t>(B * Sk);
  // Query block 0 keeps key blocks 0 and 2, query block 1 all three.
  const int32_t block_rows[3] = {0, 2, 5}, block_cols[5] = {0, 2, 0, 1, 2};
  Execution execution;
  Problem p;

  Example() {
    p.batch = B, p.heads = H, p.heads_kv = H_kv, p.seqlen_q = Sq, p.seqlen_k = Sk, p.head_dim = D, p.head_dim_v = Dv;
    p.total_q = B * Sq, p.total_k = B * Sk;
    p.dtype = DType::f64;
    p.program = score::built_in({.form = score::Form::softcap, .cap = 1.5});
    p.scale = 0.7, p.dropout = 0.25, p.seed = 11, p.offset = 3;
    p.window_left = 12, p.window_right = 0;
    for (uint8_t &m : mask) m = generator() % 4 > 0;
    std::fill_n(mask.begin(), 20, 0); // batch 0: queries 0 to 3 see none of the keys from 20 on
    p.mask.data = reinterpret_cast<char *>(mask.data());
    p.mask.dtype = DType::boolean;
    p.mask.stride[0] = Sk, p.mask.stride[3] = 1;
    p.blocks.present = true;
    p.blocks.block_q = p.blocks.block_k = 16;
    p.blocks.rows = 2, p.blocks.cols = 3, p.blocks.kept = 5;
    p.blocks.row_ptr = block_rows, p.blocks.col = block_cols;
    p.q = q.view(), p.k = k.view(), p.v = v.view(), p.bias = bias.view(), p.alibi_slopes = slopes.view(), p.sinks = sinks.view();
    p.out = out.view(), p.lse = lse.view(), p.dout = dout.view(), p.dlse = dlse.view();
    p.dq = dq.view(), p.dk = dk.view(), p.dv = dv.view(), p.dbias = dbias.view(), p.dsinks = dsinks.view();
  }

  void run(Operation operation, const strobe_selection *selection = nullptr) { reference(p, execution, operation, selection); }

  // The function that is differentiated.
  double loss() {
    run(Operation::forward);
    double sum = 0;
    for (size_t n = 0; n < out.values.size(); n++) sum += dout.values[n] * out.values[n];
    for (size_t n = 0; n < lse.values.size(); n++) sum += dlse.values[n] * lse.values[n];
    return sum;
  }
};

} // namespace

TEST_CASE("reference: gradients are those of finite differences") {
  Example e;
  e.run(Operation::backward);
  auto compare = [&](const char *name, Tensor &x, const Tensor &gradient) {
    CAPTURE(name);
    const double step = 1e-5;
    for (size_t n = 0; n < x.values.size(); n++) {
      const double saved = x.values[n];
      x.values[n] = saved + step;
      const double above = e.loss();
      x.values[n] = saved - step;
      const double below = e.loss();
      x.values[n] = saved;
      CAPTURE(n);
      CHECK(gradient.values[n] == doctest::Approx((above - below) / (2 * step)).epsilon(1e-7));
    }
  };
  compare("q", e.q, e.dq);
  compare("k", e.k, e.dk);
  compare("v", e.v, e.dv);
  compare("bias", e.bias, e.dbias);
  compare("sinks", e.sinks, e.dsinks);
}

TEST_CASE("reference: a row that sees nothing gives 0, and the sink as its LSE if there is one") {
  Example e;
  e.run(Operation::forward);
  CHECK(e.out.values[0] == 0);
  CHECK(e.lse.values[0] == e.sinks.values[0]);
  e.p.sinks = View();
  e.p.dsinks = View();
  e.run(Operation::forward);
  e.run(Operation::backward);
  CHECK(e.out.values[0] == 0);
  CHECK(e.lse.values[0] == -std::numeric_limits<double>::infinity());
  for (int64_t c = 0; c < e.D; c++) CHECK(e.dq.values[c] == 0);
}

TEST_CASE("reference: selected rows and columns are those of the full result, and nothing else is written") {
  Example full, part;
  full.run(Operation::forward);
  full.run(Operation::backward);
  const std::vector<int64_t> rows = {0, 5, 20, 21, 100, Example::B * Example::H * Example::Sq - 1};
  const std::vector<int64_t> cols = {0, 36, 37, 90, Example::B * Example::H_kv * Example::Sk - 1};
  const double untouched = 12345;
  auto compare = [&](const Tensor &all, const Tensor &selected, const std::vector<int64_t> &chosen, double tolerance) {
    const size_t width = size_t(all.shape[3]);
    for (size_t n = 0; n < all.values.size(); n++) {
      const bool written = std::binary_search(chosen.begin(), chosen.end(), int64_t(n / width));
      CAPTURE(n);
      CHECK(std::abs(selected.values[n] - (written ? all.values[n] : untouched)) <= tolerance);
    }
  };

  strobe_selection selection{sizeof(strobe_selection), rows.data(), int64_t(rows.size()), nullptr, 0};
  part.out.fill(untouched);
  part.lse.fill(untouched);
  part.run(Operation::forward, &selection);
  compare(full.out, part.out, rows, 0);
  compare(full.lse, part.lse, rows, 0);

  selection.cols = cols.data(), selection.n_cols = int64_t(cols.size());
  part.p.dbias = part.p.dsinks = View();
  auto backward = [&] {
    for (Tensor *gradient : {&part.dq, &part.dk, &part.dv}) gradient->fill(untouched);
    part.run(Operation::backward, &selection);
  };
  SUBCASE("from the given lse and out") {
    part.out = full.out, part.lse = full.lse;
    part.p.out = part.out.view(), part.p.lse = part.lse.view();
    backward();
    compare(full.dq, part.dq, rows, 0);
    compare(full.dk, part.dk, cols, 1e-14);
    compare(full.dv, part.dv, cols, 1e-14);
  }
  SUBCASE("from scratch") {
    part.p.out = part.p.lse = View();
    backward();
    compare(full.dq, part.dq, rows, 0);
    compare(full.dk, part.dk, cols, 0);
    compare(full.dv, part.dv, cols, 0);
  }
  SUBCASE("nothing selected") {
    selection.n_rows = selection.n_cols = 0;
    backward();
    compare(full.dq, part.dq, {}, 0);
    compare(full.dk, part.dk, {}, 0);
    compare(full.dv, part.dv, {}, 0);
  }
}

TEST_CASE("reference: bitwise the same for any number of threads") {
  Example one, many;
  many.execution.threads = 3;
  for (Example *e : {&one, &many}) {
    e->run(Operation::forward);
    e->run(Operation::backward);
  }
  for (auto tensor : {&Example::out, &Example::lse, &Example::dq, &Example::dk, &Example::dv, &Example::dbias, &Example::dsinks})
    CHECK((one.*tensor).values == (many.*tensor).values);
}

TEST_CASE("reference: a bad selection is refused with its reason, and nothing is written") {
  Example e;
  const int64_t falling[] = {3, 3}, outside[] = {Example::B * Example::H * Example::Sq}, negative[] = {-1};
  auto refused = [&](Operation operation, strobe_selection selection, const char *reason) {
    std::string said;
    try {
      e.run(operation, &selection);
    } catch (const Error &error) {
      CHECK(error.status == STROBE_INVALID_ARGUMENT);
      said = error.what();
    }
    CHECK(said == reason);
    for (const Tensor *x : {&e.out, &e.lse, &e.dq, &e.dk, &e.dv})
      CHECK(std::all_of(x->values.begin(), x->values.end(), [](double value) { return value == 0; }));
  };
  const uint64_t size = sizeof(strobe_selection);
  refused(Operation::forward, {size, falling, 2, nullptr, 0},
          "rows: [1] is 3 after 3; accepted are flat indices from 0 to 167, strictly ascending");
  refused(Operation::forward, {size, outside, 1, nullptr, 0},
          "rows: [0] is 168; accepted are flat indices from 0 to 167, strictly ascending");
  refused(Operation::backward, {size, nullptr, 0, negative, 1},
          "cols: [0] is -1; accepted are flat indices from 0 to 147, strictly ascending");
  refused(Operation::forward, {size, nullptr, 2, nullptr, 0},
          "rows: 2 indices at a null pointer; accepted is an array and its length, or null and 0 for all");
  refused(Operation::forward, {size, nullptr, 0, falling, 1}, "cols: given in forward; accepted is null, for they are those of dk and dv");
  refused(Operation::backward, {size, falling, 1, nullptr, 0}, "dbias: given with rows; accepted is null, for it is a sum over all rows");
  e.p.dbias = View();
  refused(Operation::backward, {size, falling, 1, nullptr, 0}, "dsinks: given with rows; accepted is null, for it is a sum over all rows");
}
