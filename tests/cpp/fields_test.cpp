// Every field of the table (strobe/fields.inc) appears in explain(), in prepared calls and in the checks.
#include "call.h"

#include <set>

using namespace strobe;
using namespace strobe::test;

namespace {

// What strobe_explain says about the call, without the engines; empty if the call is refused.
std::string explained(Call &call) {
  std::string text(1 << 14, '\0');
  const int32_t status = strobe_explain(&call.attention, &call.tensors, &call.execution, static_cast<int32_t>(call.operation), text.data(),
                                        text.size(), nullptr);
  if (status != STROBE_OK) return "";
  return text.substr(0, text.find("\nengines\n"));
}

// A call with q, k, v, out and lse.
void make_plain(Call &call, Operation operation = Operation::forward) {
  make_dense(call, operation);
  for (const char *name : {"mask", "bias", "alibi_slopes", "sinks", "rng", "seqused_k", "max_logit", "column_sums", "dbias", "dsinks"})
    call.drop(name);
  call.attention.dropout = 0;
}

// Makes one of two calls that differ in one option. with: whether the option is given.
using MakeEither = void (*)(Call &, bool with);
const std::map<std::string, MakeEither> kExamples = {
    {"scale", [](Call &c, bool with) { make_plain(c), c.attention.has_scale = with, c.attention.scale = with ? 0.7 : 0; }},
    {"causal", [](Call &c, bool with) { make_plain(c), c.attention.causal = with; }},
    {"alignment", [](Call &c, bool with) { make_plain(c), c.attention.alignment = with ? STROBE_TOP_LEFT : STROBE_BOTTOM_RIGHT; }},
    {"window_left", [](Call &c, bool with) { make_plain(c), c.attention.has_window_left = with, c.attention.window_left = with ? 3 : 0; }},
    {"window_right",
     [](Call &c, bool with) { make_plain(c), c.attention.has_window_right = with, c.attention.window_right = with ? 3 : 0; }},
    {"softcap", [](Call &c, bool with) { make_plain(c), c.attention.softcap = with ? 20 : 0; }},
    {"dropout", [](Call &c, bool with) { make_plain(c), c.attention.dropout = with ? 0.5 : 0; }},
    {"seed", [](Call &c, bool with) { make_plain(c), c.attention.dropout = 0.5, c.attention.seed = with; }},
    {"offset", [](Call &c, bool with) { make_plain(c), c.attention.dropout = 0.5, c.attention.offset = with; }},
    {"block_q", [](Call &c, bool with) { with ? make_sparse(c, Operation::forward) : make_plain(c); }},
    {"block_k", [](Call &c, bool with) { with ? make_sparse(c, Operation::forward) : make_plain(c); }},
    {"tile_q", [](Call &c, bool with) { make_plain(c), c.attention.tile_q = with ? 50 : 0; }},
    {"tile_k", [](Call &c, bool with) { make_plain(c), c.attention.tile_k = with ? 50 : 0; }},
    {"max_seqlen_q", [](Call &c, bool with) { make_varlen(c, Operation::forward), c.attention.max_seqlen_q = with ? 20 : 0; }},
    {"max_seqlen_k",
     [](Call &c, bool with) {
       make_varlen(c, Operation::forward), c.add_values<int32_t>("cu_seqlens_k", DType::i32, {0, 10, 20});
       c.attention.max_seqlen_k = with ? 30 : 0;
     }},
    {"engine", [](Call &c, bool with) { make_plain(c), c.attention.engine = with ? "cpu-baseline" : nullptr; }},
    {"score",
     [](Call &c, bool with) { make_plain(c), c.attention.score = with ? STROBE_HYPERBOLIC : STROBE_DOT, c.attention.beta = with; }},
    {"beta", [](Call &c, bool with) { make_plain(c), c.attention.score = STROBE_HYPERBOLIC, c.attention.beta = with ? 2 : 1; }},
    {"shift",
     [](Call &c, bool with) { make_plain(c), c.attention.score = STROBE_HYPERBOLIC, c.attention.beta = 1, c.attention.shift = with; }},
    {"part",
     [](Call &c, bool with) {
       static PartOf part;
       make_part(c, part, Operation::forward);
       if (!with) c.attention.part = nullptr;
     }},
    {"k_scale_group", [](Call &c, bool with) { make_quantised(c, DType::i8, with, make_dense); }},
    {"score_function",
     [](Call &c, bool with) {
       make_plain(c);
       Nodes f;
       f.add(STROBE_OP_SINH, {f.add(STROBE_OP_SCORE)});
       if (with) c.attention.score_function = c.function(f.all);
     }},
    {"mask_function",
     [](Call &c, bool with) {
       make_plain(c);
       Nodes g;
       g.add(STROBE_OP_LESS, {g.add(STROBE_OP_QUERY), g.add(STROBE_OP_KEY)});
       if (with) c.attention.mask_function = c.function(g.all);
     }},
#define STROBE_MODE(name) {#name, [](Call &c, bool with) { make_plain(c), c.attention.name = with; }},
#define STROBE_BACKWARD_MODE(name) {#name, [](Call &c, bool with) { make_plain(c, Operation::backward), c.attention.name = with; }},
#include "strobe/fields.inc"
};

// Calls that together have every tensor.
void (*const kHoldingAll[])(Call &) = {
    [](Call &c) { make_dense(c, Operation::forward); },
    [](Call &c) { make_dense(c, Operation::backward); },
    [](Call &c) { make_varlen(c, Operation::forward); },
    [](Call &c) { make_sparse(c, Operation::backward); },
    [](Call &c) { make_paged(c, true); },
    [](Call &c) { make_quantised(c, DType::i8, true, make_dense), make_for_reference(c); },
    [](Call &c) {
      make_quantised(c, DType::e4m3, false, make_dense);
      c.add("q", DType::e4m3, {B, H, Sq, D}), c.add("q_scale", DType::f16, {B, H, Sq}), c.add("out", DType::bf16, {B, H, Sq, Dv});
    },
    [](Call &c) {
      static PartOf part;
      make_part(c, part, Operation::backward, true);
    },
    [](Call &c) { make_captured(c, Operation::forward), make_for_reference(c); },
    make_captured_gradients,
    [](Call &c) { make_full_blocks(c, Operation::backward); },
    [](Call &c) { make_tangents(c, false), c.drop("out"), c.drop("lse"); },
    [](Call &c) { make_tangents(c, true, 4); },
};

} // namespace

TEST_CASE("fields: explain tells each option") {
  std::set<std::string> named;
#define STROBE_OPTION(name) named.insert(#name);
#define STROBE_OPTIONAL(name) named.insert(#name);
#define STROBE_RESERVED(name)
#include "strobe/fields.inc"
  for (const std::string &name : named) {
    CAPTURE(name);
    const auto example = kExamples.find(name);
    REQUIRE_MESSAGE(example != kExamples.end(), "a new option needs a line in kExamples");
    Call with, without;
    example->second(with, true), example->second(without, false);
    const std::string text = explained(with);
    CHECK_MESSAGE(!text.empty(), error());
    CHECK(text != explained(without));
  }
}

TEST_CASE("fields: explain tells each tensor that a call may do without") {
  // The forward always writes lse, and the backward the gradients. dlse changes no plan.
  const std::set<std::string> untold = {"lse", "dlse", "dq", "dk", "dv", "dbias", "dsinks", "tlse"};
  for (auto make : kHoldingAll)
    for (const NamedSlot &s : kSlots) {
      CAPTURE(std::string(s.name));
      Call with, without;
      make(with), make(without);
      if (!(with.tensors.*s.slot) || untold.contains(s.name)) continue;
      without.drop(s.name);
      if (const std::string tangent = std::string("t") + s.name; without.has(tangent)) without.drop(tangent);
      const std::string gradient = std::string("d") + s.name;
      if (gradient == "dbias" || gradient == "dsinks" || gradient.starts_with("dcaptured_")) without.drop(gradient);
      const std::string text = explained(without);
      if (!text.empty()) CHECK(text != explained(with)); // the text is empty if the call needs the option
    }
}

TEST_CASE("fields: a prepared call knows the address of each tensor") {
  std::set<std::string> known;
  for (auto make : kHoldingAll) {
    Call call;
    make(call);
    strobe_prepared *prepared = nullptr;
    REQUIRE_MESSAGE(strobe_prepare(&call.attention, &call.tensors, &call.execution, static_cast<int32_t>(call.operation), &prepared) ==
                        STROBE_OK,
                    error());
    for (const NamedSlot &s : kSlots) {
      CAPTURE(std::string(s.name));
      strobe_addresses at = addresses(call);
      if (at.*s.address) {
        known.insert(s.name);
        at.*s.address = nullptr;
        CHECK(strobe_run(prepared, &at, nullptr) == STROBE_INVALID_ARGUMENT);
        CHECK(error() == std::string(s.name) + ": null; accepted is null only for a tensor without elements");
      } else {
        at.*s.address = call.tensors.q->data;
        CHECK(strobe_run(prepared, &at, nullptr) == STROBE_INVALID_ARGUMENT);
        CHECK(error() == std::string(s.name) + ": given, where the call was prepared without one; accepted is null");
      }
    }
    strobe_release(prepared);
  }
  for (const NamedSlot &s : kSlots) CHECK_MESSAGE(known.contains(s.name), s.name << ": a new tensor needs a call in kHoldingAll");
}

TEST_CASE("fields: a value without its has_ flag, a flag beyond 1 and a reserved member are refused by name") {
  auto refused = [](auto strobe_attention::*member, auto value) {
    Call call;
    make_plain(call);
    call.attention.*member = value;
    CHECK(call.run() == STROBE_INVALID_ARGUMENT);
    return error();
  };
#define STROBE_OPTIONAL(name)                                                                                                              \
  CHECK(refused(&strobe_attention::name, 1) == #name ": 1 while has_" #name " is 0; accepted is 0, or has_" #name " = 1");                 \
  CHECK(refused(&strobe_attention::has_##name, 2) == "has_" #name ": 2; accepted is 0 or 1");
#define STROBE_FLAG(name) CHECK(refused(&strobe_attention::name, 2) == #name ": 2; accepted is 0 or 1");
#define STROBE_RESERVED(name) CHECK(refused(&strobe_attention::name, 1) == #name ": 1; accepted is 0");
#include "strobe/fields.inc"
}
