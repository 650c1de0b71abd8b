// Functions of the score on each CPU engine of this machine: with pages, with quantised keys, in parts, and with the same bits in any tile.
// agreement_test.cpp tests all other options.
#include "functions.h"

#include <cstring>

namespace strobe::cpu_functions_test {

using namespace strobe::test;

namespace {

std::vector<std::string> engines() {
  std::vector<std::string> all;
  for (int32_t e = 0; const char *engine = strobe_engine_name(e); e++)
    if (std::strncmp(engine, "cpu-", 4) == 0 && !strobe_engine_missing(e)) all.push_back(engine);
  return all;
}

// Numbers of size 1, and a mask that hides some keys.
void fill(Call &c) {
  int seed = 0;
  for (const char *name : {"q", "k", "v", "k_scale", "v_scale", "bias", "alibi_slopes", "sinks", "dout", "dlse"}) {
    seed++;
    if (!c.has(name)) continue;
    const size_t count = c.memory_bytes(name);
    switch (static_cast<DType>(c[name].dtype)) {
    case DType::f32:
      c.fill<float>(name, seed, 0.7);
      if (std::strstr(name, "scale"))
        for (size_t n = 0; n < count / 4; n++) c.data<float>(name)[n] = 0.02f + 0.001f * float(n % 7);
      break;
    case DType::f16:
      for (size_t n = 0; n < count / 2; n++) c.data<uint16_t>(name)[n] = uint16_t(0x2400 + 13 * n % 0x300);
      break;
    default:
      for (size_t n = 0; n < count; n++) c.data<uint8_t>(name)[n] = uint8_t(n * 37 % 251);
    }
  }
  if (c.has("mask"))
    for (size_t n = 0; n < c.memory_bytes("mask"); n++) c.data<uint8_t>("mask")[n] = n % 7 != 3;
}

using Make = void (*)(Call &, Operation);
void in_pages(Call &c, Operation) { make_paged(c, false); }
void in_packed_pages(Call &c, Operation) { make_paged(c, true); }
void few_in_pages(Call &c, Operation) { // 3 queries are few: keys lie across lanes
  make_paged(c, false);
  c.add("q", DType::f32, {B, H, 3, D}), c.add("out", DType::f32, {B, H, 3, Dv}), c.add("lse", DType::f32, {B, H, 3});
  c.add("mask", DType::boolean, {B, 1, 3, kPagesEach * kPage});
}
void few(Call &c, Operation operation) {
  make_dense(c, operation);
  for (const char *name : {"mask", "rng", "max_logit", "column_sums"}) c.drop(name);
  c.add("q", DType::f32, {B, H, 1, D}), c.add("out", DType::f32, {B, H, 1, Dv}), c.add("lse", DType::f32, {B, H, 1});
  c.attention.dropout = 0;
}
void quantised(Call &c, Operation) { make_quantised(c, DType::i8, false, make_dense); }
void quantised_by_column(Call &c, Operation) { make_quantised(c, DType::i8, true, make_dense); }
void few_quantised(Call &c, Operation operation) {
  make_quantised(c, DType::i8, false, [](Call &call, Operation d) { few(call, d); });
  (void)operation;
}
void part(Call &c, Operation operation) {
  static PartOf of;
  make_part(c, of, operation);
}
void partial_part(Call &c, Operation operation) {
  static PartOf of;
  make_part(c, of, operation, true);
}
void sparse(Call &c, Operation operation) { make_sparse(c, operation); }

void make(Call &c, Make how, Operation operation, const NamedFunction &function) {
  how(c, operation);
  c.operation = operation;
  fill(c);
  give(c, function, {B, H, 40});
}

bool given(const Call &c, const std::string &name) {
  for (const NamedSlot &s : kSlots)
    if (name == s.name) return c.tensors.*s.slot;
  return false;
}

// make_for_reference(), for the results that the call asks for.
void for_reference(Call &c) {
  std::vector<const char *> dropped;
  for (const NamedSlot &s : kSlots)
    if (c.has(s.name) && !given(c, s.name)) dropped.push_back(s.name);
  make_for_reference(c);
  for (const char *name : dropped) c.drop(name);
}

void compare(Call &found, Call &expected, const char *name) {
  CAPTURE(std::string(name));
  const float *x = found.data<float>(name);
  const double *ref = expected.data<double>(name);
  const size_t count = found.memory_bytes(name) / sizeof(float);
  REQUIRE(count == expected.memory_bytes(name) / sizeof(double));
  double most = 1e-3;
  for (size_t n = 0; n < count; n++)
    if (std::isfinite(ref[n])) most = std::max(most, std::fabs(ref[n]));
  for (size_t n = 0; n < count; n++) {
    CAPTURE(n);
    const bool good = double(x[n]) == ref[n] || std::fabs(x[n] - ref[n]) <= 2e-5 * most;
    if (!good) REQUIRE(double(x[n]) == ref[n]);
  }
}

} // namespace

TEST_CASE("functions on CPU engines: pages, few queries, quantised keys, parts and blocks") {
  const std::pair<const char *, Make> all[] = {{"pages", in_pages},
                                               {"packed queries of pages", in_packed_pages},
                                               {"few queries of pages", few_in_pages},
                                               {"one query", few},
                                               {"quantised", quantised},
                                               {"quantised by column", quantised_by_column},
                                               {"one query of quantised keys", few_quantised},
                                               {"a part", part},
                                               {"a partial part", partial_part},
                                               {"blocks", sparse}};
  for (const std::string &engine : engines()) {
    int ran = 0;
    for (const auto &[what, how] : all)
      for (const NamedFunction &function : kFunctions) {
        CAPTURE(engine);
        CAPTURE(std::string(what));
        CAPTURE(std::string(function.name));
        Call forward, oracle;
        make(forward, how, Operation::forward, function), make(oracle, how, Operation::forward, function);
        for_reference(oracle);
        forward.attention.engine = engine.c_str();
        const int32_t status = forward.run();
        if (status == STROBE_UNSUPPORTED) continue;
        REQUIRE_MESSAGE(status == STROBE_OK, error());
        REQUIRE_MESSAGE(oracle.run() == STROBE_OK, error());
        ran++;
        for (const char *name : {"out", "lse", "max_logit", "column_sums"})
          if (given(forward, name) && name != std::string(how == partial_part ? "lse" : "")) compare(forward, oracle, name);
        if (how != part && how != sparse) continue;
        Call backward, backward_oracle;
        make(backward, how, Operation::backward, function), make(backward_oracle, how, Operation::backward, function);
        for_reference(backward_oracle);
        for (const char *name : {"out", "lse"})
          std::memcpy(backward.data<char>(name), forward.data<char>(name), forward.memory_bytes(name)),
              std::memcpy(backward_oracle.data<char>(name), oracle.data<char>(name), oracle.memory_bytes(name));
        backward.attention.engine = engine.c_str();
        REQUIRE_MESSAGE(backward.run() == STROBE_OK, error());
        REQUIRE_MESSAGE(backward_oracle.run() == STROBE_OK, error());
        for (const char *name : {"dq", "dk", "dv", "dsinks"})
          if (given(backward, name)) compare(backward, backward_oracle, name);
      }
    if (engine != "cpu-avx512bf16") CHECK(ran > 100); // that engine has no FP32
  }
}

TEST_CASE("functions on CPU engines: bits do not depend on the tile or on threads") {
  for (const std::string &engine : engines())
    for (const NamedFunction &function : kFunctions) {
      CAPTURE(engine);
      CAPTURE(std::string(function.name));
      std::vector<float> first;
      for (const int64_t tile : {16, 64, 128}) {
        Call c;
        make(c, make_dense, Operation::forward, function);
        c.drop("max_logit"), c.drop("column_sums");
        c.attention.engine = engine.c_str(), c.attention.invariant = 1, c.attention.tile_q = tile;
        c.execution.threads = tile == 64 ? 3 : 1;
        const int32_t status = c.run();
        if (status == STROBE_UNSUPPORTED) continue;
        REQUIRE_MESSAGE(status == STROBE_OK, error());
        const float *out = c.data<float>("out");
        const std::vector<float> bits(out, out + c.memory_bytes("out") / sizeof(float));
        if (first.empty()) first = bits;
        CHECK(std::memcmp(first.data(), bits.data(), bits.size() * sizeof(float)) == 0);
      }
    }
}

} // namespace strobe::cpu_functions_test
