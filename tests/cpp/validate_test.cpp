// Each argument, wrong in each way. The message must be clear, name the argument and the accepted values; and nothing may be written.
#include "call.h"
#include "refusals.h"

#include <cmath>
#include <functional>
#include <limits>

using namespace strobe;
using namespace strobe::test;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kHuge = int64_t{1} << 62;

using Make = void (*)(Call &, Operation);
using Break = std::function<void(Call &)>;

struct Wrong {
  const char *message; // the beginning of the message: the argument and the error
  Break how;
};

void expect_one_message(Make make, Operation operation, const Wrong &wrong) {
  const std::string expected = wrong.message;
  CAPTURE(expected);
  Call call;
  make(call, operation);
  wrong.how(call);
  REQUIRE(call.run() == STROBE_INVALID_ARGUMENT);
  const std::string text = strobe_last_error();
  CAPTURE(text);
  CHECK(lines(text).size() == 1);
  CHECK(text.starts_with(expected));
  CHECK(rendered() == text);
  CHECK(text.find("; accepted ") != std::string::npos);
  CHECK(call.untouched());
}

void expect_each(Make make, Operation operation, const std::vector<Wrong> &all) {
  for (const Wrong &wrong : all) expect_one_message(make, operation, wrong);
}

Break set(double strobe_attention::*field, double value) {
  return [=](Call &c) { c.attention.*field = value; };
}
Break set(int32_t strobe_attention::*field, int32_t value) {
  return [=](Call &c) { c.attention.*field = value; };
}
Break set(int64_t strobe_attention::*field, int64_t value) {
  return [=](Call &c) { c.attention.*field = value; };
}
Break shape(const char *name, int axis, int64_t size) {
  return [=](Call &c) { c[name].shape[axis] = size; };
}
Break stride(const char *name, int axis, int64_t stride) {
  return [=](Call &c) { c[name].strides[axis] = stride; };
}
Break dtype(const char *name, DType type) {
  return [=](Call &c) { c[name].dtype = static_cast<int32_t>(type); };
}
template <class T> Break value(const char *name, int index, T value) {
  return [=](Call &c) { c.data<T>(name)[index] = value; };
}
Break drop(const char *name) {
  return [=](Call &c) { c.drop(name); };
}

} // namespace

TEST_CASE("validate: the calls that the tests below break are valid") {
  for (Make make : {make_dense, make_varlen, make_sparse})
    for (Operation operation : {Operation::forward, Operation::backward}) {
      Call call;
      make(call, operation);
      CHECK_NOTHROW(call.validated());
    }
}

TEST_CASE("validate: every tensor wrong as a tensor") {
  for (Make make : {make_dense, make_varlen, make_sparse})
    for (Operation operation : {Operation::forward, Operation::backward}) {
      Call whole;
      make(whole, operation);
      for (const NamedSlot &s : kSlots) {
        if (!whole.has(s.name)) continue;
        const std::string prefix = s.name;
        auto wrong = [&](const std::string &message, auto how) {
          const std::string all = prefix + ": " + message;
          expect_one_message(make, operation, {all.c_str(), [&](Call &c) { how(c[s.name]); }});
        };
        wrong("dtype 42 (unknown)", [](strobe_tensor &t) { t.dtype = 42; });
        wrong("dtype 0 (none)", [](strobe_tensor &t) { t.dtype = 0; });
        wrong("rank 0", [](strobe_tensor &t) { t.rank = 0; });
        wrong("rank -1", [](strobe_tensor &t) { t.rank = -1; });
        wrong("rank 5", [](strobe_tensor &t) { t.rank = 5; });
        wrong("shape (", [](strobe_tensor &t) { t.shape[t.rank - 1] = -1; });
        wrong("device_type 7", [](strobe_tensor &t) { t.device_type = 7; });
        wrong("device_index 3", [](strobe_tensor &t) { t.device_index = 3; });
        wrong("data is null", [](strobe_tensor &t) { t.data = nullptr; });
        if (whole[s.name].dtype != STROBE_BOOL)
          wrong("data is not aligned", [](strobe_tensor &t) { t.data = static_cast<char *>(t.data) + 1; });
        wrong("shape (", [](strobe_tensor &t) { t.strides[t.rank - 1] = kHuge; });
        if (prefix != "q") wrong("lies on CUDA device 0", [](strobe_tensor &t) { t.device_type = STROBE_CUDA; });
      }
    }
}

TEST_CASE("validate: what is missing") {
  expect_each(make_dense, Operation::forward,
              {{"q: missing", drop("q")},
               {"k: missing", drop("k")},
               {"v: missing", drop("v")},
               {"out: missing", drop("out")},
               {"column_sums: given without lse; accepted is both, or lse alone", drop("lse")}});
  expect_each(make_dense, Operation::backward,
              {{"out: missing", drop("out")},
               {"lse: missing", drop("lse")},
               {"dout: missing", drop("dout")},
               {"dbias: given without bias", drop("bias")},
               {"dsinks: given without sinks", drop("sinks")}});
  expect_each(make_varlen, Operation::forward,
              {{"cu_seqlens_q: missing", drop("cu_seqlens_q")}, {"cu_seqlens_k: missing", drop("cu_seqlens_k")}});
  expect_each(make_sparse, Operation::forward,
              {{"block_cols: missing", drop("block_cols")},
               {"block_cols_t: missing", drop("block_cols_t")},
               {"block_cols_t: given without block_rows_t", drop("block_rows_t")}});
  expect_each(
      make_full_blocks, Operation::forward,
      {{"block_full: given without mask_function; accepted is both, or neither", [](Call &c) { c.attention.mask_function = nullptr; }},
       {"block_full_t: missing; accepted is a tensor beside block_full and block_rows_t", drop("block_full_t")},
       {"block_full_t: given without block_full", drop("block_full")},
       {"block_full_t: given without block_rows_t", [](Call &c) { c.drop("block_rows_t"), c.drop("block_cols_t"); }},
       {"block_full: shape (4)", shape("block_full", 0, 4)},
       {"block_full_t: shape (4)", shape("block_full_t", 0, 4)}});
}

TEST_CASE("validate: shapes that do not agree") {
  expect_each(
      make_dense, Operation::forward,
      {{"q: head dimension 0", shape("q", 3, 0)},
       {"q: head dimension 577; accepted is 1 to 576", [](Call &c) { c.add("q", DType::f32, {B, H, Sq, 577}); }},
       {"v: head dimension 513; accepted is 1 to 512",
        [](Call &c) { c.add("v", DType::f32, {B, Hkv, Sk, 513}), c.add("out", DType::f32, {B, H, Sq, 513}); }},
       {"k: shape (1, 2, 38, 8); accepted is (B, Hkv, Sk, D) = (2, any, any, 8)", shape("k", 0, 1)},
       {"k: shape (2, 2, 38, 7)", shape("k", 3, 7)},
       {"k: 3 heads for the 4 of q", [](Call &c) { c.add("k", DType::f32, {B, 3, Sk, D}), c.add("v", DType::f32, {B, 3, Sk, Dv}); }},
       {"k: 0 heads", [](Call &c) { c["k"].shape[1] = c["v"].shape[1] = 0; }},
       {"v: shape (1, 2, 38, 6)", shape("v", 0, 1)},
       {"v: shape (2, 1, 38, 6)", shape("v", 1, 1)},
       {"v: shape (2, 2, 37, 6)", shape("v", 2, 37)},
       {"mask: shape (2, 2, 21, 38); accepted is (B|1, H|1, Sq|1, Sk|1) = (2|1, 4|1, 21|1, 38|1)", shape("mask", 1, 2)},
       {"mask: shape (2, 1, 20, 38)", shape("mask", 2, 20)},
       {"bias: shape (1, 4, 1, 37)", shape("bias", 3, 37)},
       {"alibi_slopes: shape (2, 3)", shape("alibi_slopes", 1, 3)},
       {"alibi_slopes: shape (1, 4)", shape("alibi_slopes", 0, 1)},
       {"sinks: shape (3)", shape("sinks", 0, 3)},
       {"rng: shape (1)", shape("rng", 0, 1)},
       {"out: shape (2, 4, 21, 5)", shape("out", 3, 5)},
       {"out: shape (2, 4, 20, 6)", shape("out", 2, 20)},
       {"lse: shape (2, 4, 20)", shape("lse", 2, 20)},
       {"max_logit: shape (2, 3); accepted is (B, H) = (2, 4)", shape("max_logit", 1, 3)},
       {"column_sums: shape (2, 4, 37); accepted is (B, H, Sk) = (2, 4, 38)", shape("column_sums", 2, 37)}});
  expect_each(make_dense, Operation::backward,
              {{"dout: shape (2, 4, 20, 6)", shape("dout", 2, 20)},
               {"dlse: shape (2, 3, 21)", shape("dlse", 1, 3)},
               {"dq: shape (2, 4, 20, 8)", shape("dq", 2, 20)},
               {"dk: shape (2, 1, 38, 8)", shape("dk", 1, 1)},
               {"dv: shape (2, 2, 38, 5)", shape("dv", 3, 5)},
               {"dbias: shape (1, 4, 1, 37)", shape("dbias", 3, 37)},
               {"dsinks: shape (3)", shape("dsinks", 0, 3)}});
  expect_each(make_varlen, Operation::forward,
              {{"cu_seqlens_k: shape (2); accepted is (B+1) = (3)", shape("cu_seqlens_k", 0, 2)},
               {"cu_seqlens_q: shape (0)", [](Call &c) { c["cu_seqlens_q"].shape[0] = 0; }},
               {"v: shape (37, 2, 6); accepted is (Tk, Hkv, Dv) = (38, 2, any)", shape("v", 0, 37)},
               {"out: shape (20, 4, 6); accepted is (Tq, H, Dv) = (21, 4, 6)", shape("out", 0, 20)},
               {"lse: shape (4, 20)", shape("lse", 1, 20)},
               {"max_logit: shape (1, 4); accepted is (B, H) = (2, 4)", shape("max_logit", 0, 1)},
               {"column_sums: shape (4, 37); accepted is (H, Tk) = (4, 38)", shape("column_sums", 1, 37)}});
  expect_each(make_sparse, Operation::forward,
              {{"block_rows: shape (2, 3, 3); accepted is (B|1, H|1, nq+1) = (2|1, 4|1, 3)", shape("block_rows", 1, 3)},
               {"block_rows: shape (2, 1, 2)", shape("block_rows", 2, 2)},
               {"block_rows_t: shape (1, 1, 4)", shape("block_rows_t", 0, 1)},
               {"block_rows_t: shape (2, 1, 3)", shape("block_rows_t", 2, 3)},
               {"block_cols_t: shape (4)", shape("block_cols_t", 0, 4)}});
  Call call;
  make_dense(call, Operation::forward);
  call["q"].shape[1] = 0;
  CHECK(call.run() == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()).starts_with("q: 0 heads"));
}

TEST_CASE("validate: dtypes that do not agree") {
  expect_each(make_dense, Operation::forward,
              {{"q: dtype int32; accepted is float32, float16, bfloat16, float64", dtype("q", DType::i32)},
               {"k: dtype float16; accepted is float32", dtype("k", DType::f16)},
               {"v: dtype float64; accepted is float32", dtype("v", DType::f64)},
               {"mask: dtype float32; accepted is bool", dtype("mask", DType::f32)},
               {"bias: dtype bfloat16; accepted is float32", dtype("bias", DType::bf16)},
               {"alibi_slopes: dtype float64; accepted is float32", dtype("alibi_slopes", DType::f64)},
               {"sinks: dtype float16; accepted is float32", dtype("sinks", DType::f16)},
               {"rng: dtype int32; accepted is int64", dtype("rng", DType::i32)},
               {"out: dtype float64; accepted is float32", dtype("out", DType::f64)},
               {"lse: dtype float64; accepted is float32", dtype("lse", DType::f64)}});
  expect_each(make_dense, Operation::backward,
              {{"dlse: dtype float16", dtype("dlse", DType::f16)},
               {"dq: dtype float16", dtype("dq", DType::f16)},
               {"dbias: dtype float64", dtype("dbias", DType::f64)}});
  expect_each(make_varlen, Operation::forward,
              {{"cu_seqlens_q: dtype bool; accepted is int32, int64", dtype("cu_seqlens_q", DType::boolean)}});
  expect_each(make_sparse, Operation::forward, {{"block_cols: dtype int64; accepted is int32", dtype("block_cols", DType::i64)}});
}

TEST_CASE("validate: options") {
  using A = strobe_attention;
  auto hyperbolic = [](double A::*field, double value) {
    return [=](Call &c) { c.attention.score = STROBE_HYPERBOLIC, c.attention.beta = 1, c.attention.*field = value; };
  };
  expect_each(make_dense, Operation::forward,
              {{"scale: inf", [](Call &c) { c.attention.has_scale = 1, c.attention.scale = kInf; }},
               {"scale: nan", [](Call &c) { c.attention.has_scale = 1, c.attention.scale = kNan; }},
               {"scale: 0.5 while has_scale is 0", set(&A::scale, 0.5)},
               {"softcap: -1", set(&A::softcap, -1.0)},
               {"softcap: inf", set(&A::softcap, kInf)},
               {"softcap: nan", set(&A::softcap, kNan)},
               {"score: 2; accepted is 0 (q.k) or 1 (hyperbolic)", set(&A::score, 2)},
               {"beta: 2 with a score of q.k itself", set(&A::beta, 2.0)},
               {"shift: -1 with a score of q.k itself", set(&A::shift, -1.0)},
               {"beta: 0; accepted with a hyperbolic score", set(&A::score, int(STROBE_HYPERBOLIC))},
               {"beta: inf; accepted with a hyperbolic score", hyperbolic(&A::beta, kInf)},
               {"beta: nan; accepted with a hyperbolic score", hyperbolic(&A::beta, kNan)},
               {"shift: inf", hyperbolic(&A::shift, kInf)},
               {"softcap: 3 with a hyperbolic score; accepted is 0", hyperbolic(&A::softcap, 3.0)},
               {"reserved: 1", set(&A::reserved, 1)},
               {"reserved_2: 1", set(&A::reserved_2, 1)},
               {"accumulate: -1", set(&A::accumulate, -1)},
               {"dropout: 1;", set(&A::dropout, 1.0)},
               {"dropout: -0.1", set(&A::dropout, -0.1)},
               {"dropout: nan", set(&A::dropout, kNan)},
               {"alignment: 2", set(&A::alignment, 2)},
               {"has_scale: 2", set(&A::has_scale, 2)},
               {"causal: -1", set(&A::causal, -1)},
               {"has_window_left: 3", set(&A::has_window_left, 3)},
               {"has_window_right: 3", set(&A::has_window_right, 3)},
               {"deterministic: 7", set(&A::deterministic, 7)},
               {"exact_max: 7", set(&A::exact_max, 7)},
               {"allow_tf32: 7", set(&A::allow_tf32, 7)},
               {"strict: 7", set(&A::strict, 7)},
               {"check: 7", set(&A::check, 7)},
               {"invariant: 7", set(&A::invariant, 7)},
               {"reserved_invariant: 1", set(&A::reserved_invariant, 1)},
               {"window_left: -1", [](Call &c) { c.attention.has_window_left = 1, c.attention.window_left = -1; }},
               {"window_left: 4 while has_window_left is 0", set(&A::window_left, int64_t{4})},
               {"window_right: -1", [](Call &c) { c.attention.has_window_right = 1, c.attention.window_right = -1; }},
               {"window_right: 4 while has_window_right is 0", set(&A::window_right, int64_t{4})},
               {"tile_q: -1", set(&A::tile_q, int64_t{-1})},
               {"tile_k: 1099511627776", set(&A::tile_k, int64_t{1} << 40)},
               {"max_seqlen_q: 5 without cu_seqlens", set(&A::max_seqlen_q, int64_t{5})},
               {"max_seqlen_k: 5 without cu_seqlens", set(&A::max_seqlen_k, int64_t{5})},
               {"block_q: 16 without block_rows", set(&A::block_q, int64_t{16})},
               {"block_k: 16 without block_rows", set(&A::block_k, int64_t{16})},
               {"engine: \"no-such\" is unknown; accepted are ", [](Call &c) { c.attention.engine = "no-such"; }},
#if defined(__aarch64__)
               {"engine: \"cpu-avx2\" runs on x86-64 alone; accepted are ", [](Call &c) { c.attention.engine = "cpu-avx2"; }},
#else
               {"engine: \"cpu-neon\" runs on aarch64 alone; accepted are ", [](Call &c) { c.attention.engine = "cpu-neon"; }},
#endif
               {"execution.threads: 1025; accepted is 1 to 1024", [](Call &c) { c.execution.threads = 1025; }}});
  expect_each(
      make_varlen, Operation::forward,
      {{"max_seqlen_q: -1", set(&A::max_seqlen_q, int64_t{-1})}, {"max_seqlen_k: 2147483648", set(&A::max_seqlen_k, int64_t{1} << 31)}});
  expect_each(make_dense, Operation::forward,
              {{"softcap: 3.5e+38; accepted for q of float32 is at most 2e+38", set(&A::softcap, 3.5e38)},
               {"scale: -3e+38; accepted for q of float32 is at most 2e+38",
                [](Call &c) { c.attention.has_scale = 1, c.attention.scale = -3e38; }}});
  expect_each(make_sparse, Operation::forward,
              {{"block_q: 0", set(&A::block_q, int64_t{0})},
               {"block_q: 24", set(&A::block_q, int64_t{24})},
               {"block_k: -16", set(&A::block_k, int64_t{-16})}});
}

TEST_CASE("validate: what host memory holds") {
  expect_each(
      make_varlen, Operation::forward,
      {{"cu_seqlens_q: starts at 1", value("cu_seqlens_q", 0, 1)},
       {"cu_seqlens_q: falls from 22 at [1] to 21",
        [](Call &c) { c.attention.max_seqlen_q = 30, c.data<int32_t>("cu_seqlens_q")[1] = 22; }},
       {"cu_seqlens_q: ends at 22; accepted is at most the number of packed tokens, 21", value("cu_seqlens_q", 2, 22)},
       {"cu_seqlens_q: sequence 0 has 13 tokens; accepted is at most max_seqlen_q = 12", set(&strobe_attention::max_seqlen_q, int64_t{12})},
       {"cu_seqlens_k: falls from 0 at [0] to -1", value("cu_seqlens_k", 1, -1)},
       {"cu_seqlens_k: ends at 39", [](Call &c) { c.attention.max_seqlen_k = 40, c.data<int32_t>("cu_seqlens_k")[2] = 39; }}});
  expect_each(make_dense, Operation::forward,
              {{"seqused_k: 39 at [0]; accepted are 0 to 38, the length of k", value("seqused_k", 0, 39)},
               {"seqused_k: -1 at [1]; accepted are 0 to 38, the length of k", value("seqused_k", 1, -1)},
               {"seqused_k: shape (1); accepted is (B) = (2)", shape("seqused_k", 0, 1)},
               {"seqused_k: dtype bool; accepted is int32, int64", dtype("seqused_k", DType::boolean)}});
  expect_each(make_varlen, Operation::forward,
              {{"seqused_k: 1 at [0]; accepted are 0 to 0, the length of that sequence's keys",
                [](Call &c) { c.add_values<int32_t>("seqused_k", DType::i32, {1, 5}); }}});
  const Make paged = [](Call &c, Operation) { make_paged(c, false); }, paged_and_packed = [](Call &c, Operation) { make_paged(c, true); };
  expect_each(paged, Operation::forward,
              {{"page_table: page 16 at [0, 1]; accepted are 0 to 15, the pages of k and v, where keys count", value("page_table", 1, 16)},
               {"page_table: page -1 at [1, 7]", value("page_table", 15, -1)},
               {"page_table: page -7 at [0, 6]", [](Call &c) { c.drop("seqused_k"); }},
               {"page_table: shape (1, 8); accepted is (B, pages of a sequence) = (2, any)", shape("page_table", 0, 1)},
               {"page_table: dtype float32; accepted is int32, int64", dtype("page_table", DType::f32)},
               {"page_table: shape (2, 268435456) with strides (8, 0); accepted are up to 16777216 entries where some share an address",
                [](Call &c) { c["page_table"].shape[1] = 1 << 28, c["page_table"].strides[1] = 0; }},
               {"seqused_k: 41 at [0]; accepted are 0 to 40, the positions of a row of page_table", value("seqused_k", 0, 41)},
               {"v: shape (15, 2, 5, 6); accepted is (pages, Hkv, page, Dv) = (16, 2, 5, any)", shape("v", 0, 15)},
               {"mask: shape (2, 1, 21, 39)", shape("mask", 3, 39)},
               {"max_seqlen_k: 40 without cu_seqlens; accepted is 0", set(&strobe_attention::max_seqlen_k, int64_t{40})}});
  expect_each(paged_and_packed, Operation::forward,
              {{"page_table: page 16 at [0, 1]", value("page_table", 1, 16)},
               {"cu_seqlens_q: ends at 22", value("cu_seqlens_q", 2, 22)},
               {"cu_seqlens_k: given beside page_table; accepted is cu_seqlens_q alone",
                [](Call &c) { c.add_values<int32_t>("cu_seqlens_k", DType::i32, {0, 0, Sk}); }},
               {"max_seqlen_k: 40 beside page_table; accepted is 0", set(&strobe_attention::max_seqlen_k, int64_t{40})}});
  const Make by_key = [](Call &c, Operation) { make_quantised(c, DType::i8, false, make_dense); };
  const Make by_column = [](Call &c, Operation) { make_quantised(c, DType::i4x2, true, make_varlen); };
  const Make in_pages = [](Call &c, Operation) { make_quantised(c, DType::e4m3, true, [](Call &c, Operation) { make_paged(c, false); }); };
  for (Make make : {by_key, by_column, in_pages}) {
    Call call;
    make(call, Operation::forward);
    CHECK_NOTHROW(call.validated());
    call.add("v_scale", DType::f32, {Hkv}); // for each head, or for all
    CHECK_NOTHROW(call.validated());
    call.add("v_scale", DType::f32, {1});
    CHECK(call.validated().v_scale.stride[1] == 0);
    call["v_scale"].rank = 0;
    CHECK_NOTHROW(call.validated());
  }
  expect_each(by_key, Operation::forward,
              {{"k_scale: missing beside v_scale; accepted is both, or neither", drop("k_scale")},
               {"v_scale: missing beside k_scale; accepted is both, or neither", drop("v_scale")},
               {"k_scale: shape (2, 2, 37); accepted is (B, Hkv, Sk) = (2, 2, 38)", shape("k_scale", 2, 37)},
               {"k_scale: dtype bfloat16; accepted is float16, float32", dtype("k_scale", DType::bf16)},
               {"v_scale: shape (2, 1, 38); accepted is (B, Hkv, Sk) = (2, 2, 38)", shape("v_scale", 1, 1)},
               {"k_scale: rank 2; accepted is rank 3, (B, Hkv, Sk) = (2, 2, 38)", [](Call &c) { c["k_scale"].rank = 2; }},
               {"v_scale: shape (3); accepted is (Hkv|1) = (2|1)", [](Call &c) { c.add("v_scale", DType::f32, {3}); }},
               {"k_scale: rank 3; accepted is rank 4, (B, Hkv, rows of k / k_scale_group, D) = (2, 2, 1, 8)",
                set(&strobe_attention::k_scale_group, int64_t{64})},
               {"k_scale_group: 48; accepted are the multiples of 32 below 2^31, and 0 for a scale for each key",
                set(&strobe_attention::k_scale_group, int64_t{48})},
               {"k_scale_group: -32; accepted are", set(&strobe_attention::k_scale_group, int64_t{-32})},
               {"v: dtype float8_e4m3fn; accepted is int8", dtype("v", DType::e4m3)},
               {"k: dtype float32; accepted is int8, float8_e4m3fn, float8_e5m2, uint8",
                [](Call &c) { c.add("k", DType::f32, {B, Hkv, Sk, D}), c.add("v", DType::i8, {B, Hkv, Sk, Dv}); }},
               {"k: dtype int8; accepted is float32",
                [](Call &c) { c.drop("k_scale"), c.drop("v_scale"), c.add("v", DType::f32, {B, Hkv, Sk, Dv}); }}});
  expect_each(make_dense, Operation::forward,
              {{"k_scale_group: 32 without k_scale; accepted is 0", set(&strobe_attention::k_scale_group, int64_t{32})}});
  expect_each(by_column, Operation::forward,
              {{"k_scale: shape (1, 2, 8); accepted is (rows of k / k_scale_group, Hkv, D) = (2, 2, 8)", shape("k_scale", 0, 1)},
               {"k: shape (38, 2, 3); accepted is (Tk, Hkv, D/2) = (any, any, 4)", shape("k", 2, 3)}});
  expect_each(
      in_pages, Operation::forward,
      {{"k_scale: shape (15, 2, 1, 8); accepted is (pages, Hkv, rows of k / k_scale_group, D) = (16, 2, 1, 8)", shape("k_scale", 0, 15)},
       {"page_table: page 16 at [0, 1]", value("page_table", 1, 16)}});
  expect_each(
      make_sparse, Operation::forward,
      {{"block_rows: row 0 of matrix 0 begins at 1", value("block_rows", 0, 1)},
       {"block_rows: falls from 4 to 3 after row 1 of matrix 0", value("block_rows", 1, 4)},
       {"block_rows: row 0 of matrix 1 begins at 2; accepted is 3", value("block_rows", 3, 2)},
       {"block_rows: ends at 4", value("block_rows", 5, 4)},
       {"block_cols: [2] is 3", value("block_cols", 2, 3)},
       {"block_cols: [0] is -1", value("block_cols", 0, -1)},
       {"block_cols: [2] is 0 after 0", value("block_cols", 2, 0)},
       {"block_cols: [4] is 1 after 2", [](Call &c) { c.data<int32_t>("block_cols")[3] = 2, c.data<int32_t>("block_cols")[4] = 1; }},
       {"block_rows_t: ends at 6", value("block_rows_t", 7, 6)},
       {"block_cols_t: [1] is 2", value("block_cols_t", 1, 2)},
       {"block_rows_t: row 2 of matrix 0 is not what block_cols holds", value("block_cols_t", 2, 0)},
       {"block_rows_t: row 0 of matrix 0 is not what block_cols holds", [](Call &c) { // as many entries, but in other rows
          c.data<int32_t>("block_rows_t")[1] = 1, c.data<int32_t>("block_rows_t")[2] = 2;
        }}});
  Call call;
  make_sparse(call, Operation::forward);
  call.data<int32_t>("block_cols")[4] = 1;
  CHECK(call.run() == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()).starts_with("block_cols: [4] is 1 after 1"));
}

TEST_CASE("validate: what is written has memory of its own") {
  expect_each(make_dense, Operation::forward,
              {{"out: strides (504, 126, 0, 1)", stride("out", 2, 0)},
               {"out: strides (504, 126, -6, 1)", stride("out", 2, -6)},
               {"out: strides (504, 126, 5, 1)", stride("out", 2, 5)},
               {"out: shares memory with q", [](Call &c) { c["out"].data = c["q"].data; }},
               {"out: shares memory with mask", [](Call &c) { c["mask"].data = static_cast<char *>(c["out"].data) + 8; }},
               {"lse: shares memory with out", [](Call &c) { c["lse"].data = c["out"].data; }},
               {"column_sums: strides (152, 38, 0)", stride("column_sums", 2, 0)},
               {"max_logit: shares memory with lse", [](Call &c) { c["max_logit"].data = c["lse"].data; }}});
  expect_each(make_dense, Operation::backward,
              {{"dq: shares memory with q", [](Call &c) { c["dq"].data = c["q"].data; }},
               {"dv: shares memory with dk", [](Call &c) { c["dv"].data = c["dk"].data; }},
               {"dq: shares memory with lse", [](Call &c) { c["lse"].data = c["dq"].data; }},
               {"dsinks: strides (0)", stride("dsinks", 0, 0)}});
}

TEST_CASE("validate: results may lie between what is read") {
  Call apart, between;
  for (Call *c : {&apart, &between}) {
    make_dense(*c, Operation::forward);
    for (const char *extra : {"mask", "bias", "alibi_slopes", "sinks", "rng", "seqused_k", "max_logit", "column_sums", "lse"})
      c->drop(extra);
    c->attention.dropout = 0;
  }
  // A row of a buffer holds q, then out, then a gap of two numbers. Each sequence ends with three more unused numbers.
  constexpr int64_t row = D + Dv + 2, sequence = H * Sq * row + 3;
  std::vector<float> buffer(static_cast<size_t>(B * sequence));
  strobe_tensor &q = between["q"], &out = between["out"];
  q.data = buffer.data(), out.data = buffer.data() + D;
  for (strobe_tensor *t : {&q, &out}) t->strides[0] = sequence, t->strides[1] = row, t->strides[2] = H * row;
  apart.fill<float>("q", 1, 0.3);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < Sq; i++)
        for (int64_t c = 0; c < D; c++)
          buffer[b * sequence + i * H * row + h * row + c] = apart.data<float>("q")[((b * H + h) * Sq + i) * D + c];
  for (Call *c : {&apart, &between})
    for (const char *name : {"k", "v"}) c->fill<float>(name, 2, 0.7);
  REQUIRE_MESSAGE(apart.run() == STROBE_OK, std::string(strobe_last_error()));
  REQUIRE_MESSAGE(between.run() == STROBE_OK, std::string(strobe_last_error()));
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < Sq; i++)
        for (int64_t c = 0; c < Dv; c++)
          REQUIRE(buffer[b * sequence + i * H * row + h * row + D + c] == apart.data<float>("out")[((b * H + h) * Sq + i) * Dv + c]);
  out.data = buffer.data() + D - 1;
  CHECK(between.run() == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()).starts_with("out: shares memory with q"));
}

TEST_CASE("validate: sizes beyond what engines count") {
  Call call;
  make_dense(call, Operation::forward);
  for (const char *extra : {"mask", "bias", "alibi_slopes", "sinks", "rng", "seqused_k", "lse", "max_logit", "column_sums"})
    call.drop(extra);
  for (const char *name : {"q", "k", "v"})
    for (int a = 0; a < 4; a++) call[name].strides[a] = 0;
  const int64_t most = int64_t{1} << 39;
  call["q"].shape[0] = call["k"].shape[0] = call["v"].shape[0] = call["out"].shape[0] = 1;
  call["q"].shape[1] = call["out"].shape[1] = 2;
  call["q"].shape[2] = call["out"].shape[2] = 0;
  call["k"].shape[2] = call["v"].shape[2] = most;
  REQUIRE(call.run() == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()).starts_with("q: batch 1, heads 2, lengths 0 and 549755813888 are more than engines count"));
}

namespace {

// `batch` sequences of `length` queries and as many keys. They take no memory, because strides are 0.
void make_many(Call &call, int64_t batch, int64_t length) {
  make_varlen(call, Operation::forward);
  for (const char *name : {"lse", "max_logit", "column_sums"}) call.drop(name);
  call.attention.max_seqlen_q = call.attention.max_seqlen_k = 0;
  std::vector<int32_t> cu(batch + 1);
  for (int64_t b = 0; b <= batch; b++) cu[b] = int32_t(b * length);
  for (const char *name : {"cu_seqlens_q", "cu_seqlens_k"}) call.drop(name), call.add_values<int32_t>(name, DType::i32, cu);
  for (const char *name : {"q", "k", "v"}) call[name].shape[0] = batch * length, call[name].strides[0] = 0;
  call.drop("out");
  call.add("out", DType::f32, {batch * length, H, Dv});
}

} // namespace

TEST_CASE("validate: lengths in host memory bound the work, those of a caller the rest") {
  Call call;
  make_many(call, 300, 16);
  Problem p = call.validated();
  CHECK((p.longest_q() == 16 && p.longest_k() == 16));
  CHECK((p.seqlen_q == 4800 && p.seqlen_k == 4800)); // the sizes of a mask
  for (int64_t b : {0, 299}) CHECK(p.rows_q(b).length == 16);
  call.attention.max_seqlen_q = 100;
  p = call.validated();
  CHECK((p.longest_q() == 100 && p.longest_k() == 16)); // with a given maximum, plans do not depend on the lengths
  strobe_plan plan{}, bounded{};
  plan.size = bounded.size = sizeof plan;
  call.attention.max_seqlen_q = 0;
  REQUIRE(strobe_make_plan(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, &plan) == STROBE_OK);
  call.attention.max_seqlen_q = call.attention.max_seqlen_k = 16;
  REQUIRE(strobe_make_plan(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, &bounded) == STROBE_OK);
  CHECK(std::memcmp(&plan, &bounded, sizeof plan) == 0);
}

TEST_CASE("validate: many short packed sequences are counted by their tokens") {
  Call call;
  make_many(call, 1 << 19, 1); // B * H * (Tq + Tk) is 2^41
  CHECK_NOTHROW(call.validated());
  Call heads;
  make_many(heads, 4, 1);
  heads["q"].shape[1] = heads["out"].shape[1] = int64_t{1} << 37, heads["k"].shape[1] = heads["v"].shape[1] = 1;
  for (const char *name : {"q", "k", "v"}) heads[name].strides[1] = 0;
  heads["out"].shape[0] = heads["q"].shape[0] = 0; // no query has to be written
  heads.data<int32_t>("cu_seqlens_q")[1] = heads.data<int32_t>("cu_seqlens_q")[2] = 0;
  heads.data<int32_t>("cu_seqlens_q")[3] = heads.data<int32_t>("cu_seqlens_q")[4] = 0;
  heads["k"].shape[0] = heads["v"].shape[0] = 1 << 20;
  REQUIRE(heads.run() == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()).starts_with("q: heads 137438953472, tokens 0 and 1048576, sequences 4 are more than engines"));
}

TEST_CASE("validate: every reason at once, a line each") {
  Call call;
  make_dense(call, Operation::backward);
  call.attention.dropout = 2;
  call["k"].dtype = STROBE_FLOAT16;
  call["k"].shape[3] = 9;
  call["dv"].data = nullptr;
  call.drop("dout");
  REQUIRE(call.run() == STROBE_INVALID_ARGUMENT);
  const std::vector<std::string> all = lines(strobe_last_error());
  REQUIRE(all.size() == 5);
  CHECK(all[0].starts_with("dropout: 2"));
  CHECK(all[1].starts_with("k: shape (2, 2, 38, 9)"));
  CHECK(all[2].starts_with("k: dtype float16"));
  CHECK(all[3].starts_with("dout: missing"));
  CHECK(all[4].starts_with("dv: data is null"));
}

TEST_CASE("validate: also those of the head dimension, the execution and the engine") {
  Call call;
  make_dense(call, Operation::forward);
  call.add("q", DType::f32, {B, H, Sq, 600}), call.add("k", DType::f32, {B, Hkv, Sk, 600}), call.add("v", DType::f32, {B, Hkv, Sk, 600});
  call.execution.threads = -1, call.attention.engine = "no-such";
  REQUIRE(call.run() == STROBE_INVALID_ARGUMENT);
  const std::vector<std::string> all = lines(strobe_last_error());
  REQUIRE(all.size() == 5);
  CHECK(all[0].starts_with("q: head dimension 600"));
  CHECK(all[1].starts_with("k: head dimension 600"));
  CHECK(all[2].starts_with("v: head dimension 600"));
  CHECK(all[3].starts_with("execution.threads: -1"));
  CHECK(all[4].starts_with("engine: \"no-such\" is unknown"));
}

TEST_CASE("validate: what is legal although it looks odd") {
  auto accepted = [](Make make, Operation operation, const Break &how) {
    Call call;
    make(call, operation);
    how(call);
    CHECK_NOTHROW(call.validated());
  };
  SUBCASE("no batch, no queries, no keys") {
    auto empty = [&](const std::vector<std::string> &names, int axis) {
      for (Operation operation : {Operation::forward, Operation::backward})
        accepted(make_dense, operation, [&](Call &c) {
          for (const std::string &name : names)
            if (c.has(name)) c[name].shape[axis] = 0, c[name].data = nullptr;
          if (names[0] == "q" && axis == 0 && c.has("max_logit")) c["max_logit"].shape[0] = c["column_sums"].shape[0] = 0;
          if (names[0] == "k" && c.has("column_sums")) c["column_sums"].shape[2] = 0;
          if (names[0] == "k") c["mask"].shape[3] = c["bias"].shape[3] = 0, c.add_values<int32_t>("seqused_k", DType::i32, {0, 0});
          if (c.has("dbias")) c["dbias"].shape[3] = c["bias"].shape[3];
        });
    };
    empty({"q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "alibi_slopes", "mask", "seqused_k"}, 0);
    empty({"q", "out", "lse", "dout", "dlse", "dq", "mask"}, 2);
    empty({"k", "v", "dk", "dv"}, 2);
  }
  SUBCASE("inputs with strides 0 and negative") {
    accepted(make_dense, Operation::forward, [](Call &c) {
      c["q"].strides[0] = 0, c["k"].strides[3] = 0;
      c["v"].data = static_cast<float *>(c["v"].data) + (Sk - 1) * Dv, c["v"].strides[2] = -Dv;
    });
  }
  SUBCASE("gradients cut out of one packed tensor") {
    accepted(make_dense, Operation::backward, [](Call &c) {
      for (const char *name : {"k", "dk", "v", "dv"}) c.add(name, DType::f32, {B, Hkv, Sk, D});
      for (const char *name : {"out", "dout"}) c.add(name, DType::f32, {B, H, Sq, D});
      c.resize_memory("dk", B * Sk * 2 * Hkv * D * sizeof(float)); // (B, Sk, 2, Hkv, D)
      const int64_t strides[4] = {Sk * 2 * Hkv * D, D, 2 * Hkv * D, 1};
      for (const char *name : {"dk", "dv"}) std::copy_n(strides, 4, c[name].strides);
      c["dv"].data = c.data<float>("dk") + Hkv * D;
    });
  }
  SUBCASE("upper bounds above every length") {
    accepted(make_varlen, Operation::forward, set(&strobe_attention::max_seqlen_q, int64_t{1000}));
  }
  SUBCASE("float32 bias with bfloat16") {
    accepted(make_dense, Operation::forward, [](Call &c) {
      for (const char *name : {"q", "k", "v", "out"}) c[name].dtype = STROBE_BFLOAT16;
    });
  }
  SUBCASE("float64 throughout") {
    accepted(make_dense, Operation::backward, [](Call &c) {
      for (const NamedSlot &s : kSlots) {
        const std::string name = s.name;
        if (!c.has(name) || name == "mask" || name == "rng" || name == "alibi_slopes" || name == "seqused_k") continue;
        const strobe_tensor &t = c[name];
        c.add(name, DType::f64, std::vector<int64_t>(t.shape, t.shape + t.rank));
      }
    });
  }
  SUBCASE("the reference writes float64 and needs neither out nor lse") {
    accepted(make_dense, Operation::backward, [](Call &c) {
      c.attention.engine = "reference";
      c.drop("out"), c.drop("lse");
      for (const char *name : {"dq", "dk", "dv", "dbias", "dsinks"}) {
        const strobe_tensor &t = c[name];
        c.add(name, DType::f64, std::vector<int64_t>(t.shape, t.shape + t.rank));
      }
    });
  }
}

TEST_CASE("validate: what the problem says") {
  SUBCASE("dense") {
    Call call;
    make_dense(call, Operation::forward);
    call.attention.causal = 1;
    call.attention.has_window_left = call.attention.has_window_right = 1;
    call.attention.window_left = Sq + Sk, call.attention.window_right = 9;
    const Problem p = call.validated();
    CHECK(p.batch == B);
    CHECK(p.heads == H);
    CHECK(p.heads_kv == Hkv);
    CHECK(p.group() == 2);
    CHECK(p.seqlen_q == Sq);
    CHECK(p.seqlen_k == Sk);
    CHECK(p.total_q == B * Sq);
    CHECK(p.head_dim == D);
    CHECK(p.head_dim_v == Dv);
    CHECK(p.dtype == DType::f32);
    CHECK(p.scale == 1 / std::sqrt(double(D)));
    CHECK(p.window_left == kUnbounded);
    CHECK(p.window_right == 0);
    CHECK(p.q.index(1, 2, 3, 4) == ((1 * H + 2) * Sq + 3) * D + 4);
    CHECK(p.mask.index(1, 2, 3, 4) == (1 * Sq + 3) * Sk + 4);
    CHECK(p.bias.index(1, 2, 3, 4) == 2 * Sk + 4);
    CHECK(p.alibi_slopes.index(1, 2, 3, 4) == H + 2);
    CHECK(p.sinks.index(1, 2, 3, 4) == 2);
    CHECK(p.lse.index(1, 2, 3, 4) == (1 * H + 2) * Sq + 3);
  }
  SUBCASE("varlen") {
    Call call;
    make_varlen(call, Operation::backward);
    const Problem p = call.validated();
    CHECK(p.batch == 2);
    CHECK(p.seqlen_q == 13);
    CHECK(p.seqlen_k == Sk);
    CHECK(p.total_q == Sq);
    CHECK(p.rows_q(1).begin == 13);
    CHECK(p.rows_q(1).length == 8);
    CHECK(p.rows_k(0).length == 0);
    CHECK(p.q.index(1, 2, 3, 4) == (3 * H + 2) * D + 4);
    CHECK(p.dk.index(1, 1, 3, 4) == (3 * Hkv + 1) * D + 4);
    CHECK(p.lse.index(1, 2, 3, 4) == 2 * Sq + 3);
  }
  SUBCASE("sparse") {
    Call call;
    make_sparse(call, Operation::forward);
    const Problem p = call.validated();
    CHECK(p.blocks.present);
    CHECK(p.blocks.transposed);
    CHECK(p.blocks.rows == 2);
    CHECK(p.blocks.cols == 3);
    CHECK(p.blocks.kept == 5);
    CHECK(p.blocks.batch == B);
    CHECK(p.blocks.heads == 1);
  }
}
