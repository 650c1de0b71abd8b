// Calls that are modified at random, within existing memory. They must not crash (run the test under the sanitizers), and their statuses
// must agree with one another. STROBE_FUZZ_ROUNDS sets the number of rounds.
#include "call.h"
#include "refusals.h"

#include <cstdlib>
#include <iterator>
#include <memory>
#include <optional>

using namespace strobe;
using namespace strobe::test;

namespace {

class Fuzzer {
public:
  explicit Fuzzer(uint32_t seed) : random(seed) {
    const auto operation = draw(2) ? Operation::backward : Operation::forward;
    if (operation == Operation::forward && draw(4) == 0)
      make_quantised(call, pick<DType>({DType::i8, DType::e4m3, DType::e5m2, DType::i4x2}), draw(2),
                     pick<void (*)(Call &, Operation)>({make_dense, make_varlen, in_pages}));
    else if (operation == Operation::forward && draw(4) == 0)
      make_paged(call, draw(2));
    else if (draw(5) == 0)
      make_captured(call, operation);
    else
      pick<void (*)(Call &, Operation)>({make_dense, make_varlen, make_sparse})(call, operation);
    if (draw(call.has("k_scale") || call.has("captured_0") ? 2 : 4) == 0) make_for_reference(call);
    for (const char *name : {"q", "k", "v", "bias", "dout"})
      if (call.has(name) && call[name].dtype == STROBE_FLOAT32 && draw(2)) call.fill<float>(name, draw(100), 0.1);
    for (int n = draw(5); n > 0; n--) mutate();
    for (const NamedSlot &s : kSlots)
      if (call.has(s.name)) give_memory(s.name);
    if (draw(8) == 0) alias();
  }

  Call call;

private:
  std::mt19937 random;
  std::vector<std::unique_ptr<unsigned char[]>> more; // memory of tensors that have outgrown their own

  int draw(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); }
  template <class T> T pick(std::initializer_list<T> from) { return *std::next(from.begin(), draw(static_cast<int>(from.size()))); }
  int64_t size() {
    return pick<int64_t>({-1, 0, 1, 1, 2, 3, 4, 8, 16, 17, 33, 64, 300, int64_t{1} << 31, int64_t{1} << 62, INT64_MAX, INT64_MIN});
  }
  double real() { return pick<double>({0, -0.0, 0.5, 1, -1, 20, 1e-300, 1e300, INFINITY, -INFINITY, NAN}); }
  int32_t flag() { return pick<int32_t>({0, 1, 1, 1, 2, -1, INT32_MAX}); }
  std::string tensor() {
    for (;;)
      if (const char *name = kSlots[draw(std::size(kSlots))].name; call.has(name)) return name;
  }

  // Draws one of the members of strobe_attention that have this type.
  template <class T> T strobe_attention::*member() {
    std::vector<T strobe_attention::*> all;
#define STROBE_OPTION(name)                                                                                                                \
  if constexpr (std::is_same_v<decltype(strobe_attention::name), T>) all.push_back(&strobe_attention::name);
#include "strobe/fields.inc"
    return all[draw(static_cast<int>(all.size()))];
  }

  static void in_pages(Call &call, Operation) { make_paged(call, false); }

  void mutate() {
    strobe_attention &a = call.attention;
    if (a.score_function && draw(2)) return bend(const_cast<strobe_node *>(a.score_function->nodes)[draw(int(a.score_function->n_nodes))]);
    switch (draw(8)) {
    case 0:
      a.*member<double>() = real();
      return;
    case 1:
      a.*member<int32_t>() = flag();
      return;
    case 2:
      a.*member<int64_t>() = size();
      return;
    case 3:
      a.engine = pick<const char *>({nullptr, "", "cpu-baseline", "cpu-avx2", "reference", "bogus"});
      return;
    case 4: {
      uint64_t *sizes[] = {&a.size, &call.tensors.size, &call.execution.size};
      uint64_t *chosen = sizes[draw(3)];
      *chosen = draw(3) ? static_cast<uint64_t>(draw(static_cast<int>(*chosen / 8 + 1))) * 8 : static_cast<uint64_t>(draw(12));
      return;
    }
    case 5:
      call.execution.*pick<int32_t strobe_execution::*>({&strobe_execution::threads, &strobe_execution::reserved_sms}) = flag();
      return;
    case 6: { // changes the contents of a list
      const std::string name = pick<const char *>({
#define STROBE_LIST(name, place) #name,
#include "strobe/fields.inc"
      });
      if (call.has(name)) call.data<int32_t>(name)[draw(static_cast<int>(call.memory_bytes(name) / 4))] = static_cast<int32_t>(size());
      return;
    }
    default:
      bend(tensor());
    }
  }

  void bend(strobe_node &node) {
    switch (draw(6)) {
    case 0:
    case 1:
      node.operation = draw(100);
      return;
    case 2:
      node.inputs[draw(4)] = draw(30) - 1;
      return;
    case 3:
      node.captured = draw(10) - 1;
      return;
    case 4:
      node.real = real();
      return;
    default:
      node.integer = size();
    }
  }

  void bend(const std::string &name) {
    strobe_tensor &t = call[name];
    switch (draw(9)) {
    case 0:
      t.dtype = draw(13) - 1;
      return;
    case 1:
      t.device_type = flag();
      return;
    case 2:
      t.device_index = flag();
      return;
    case 3:
      t.rank = draw(8) - 2;
      return;
    case 4:
      t.shape[draw(4)] = size();
      return;
    case 5:
      t.strides[draw(4)] = draw(2) ? size() : -draw(40);
      return;
    case 6:
      t.data = draw(2) ? nullptr : static_cast<char *>(t.data) + 1;
      return;
    case 7:
      std::swap(t.shape[draw(4)], t.shape[draw(4)]);
      return;
    default:
      call.drop(name);
    }
  }

  struct Reach {
    __int128 low, high; // in bytes relative to `data`
  };
  static std::optional<Reach> reach(const strobe_tensor &t) { // empty: the tensor is absent or has no element
    const int64_t element = bytes(static_cast<DType>(t.dtype));
    if (element == 0 || t.rank < 0 || t.rank > 4) return {};
    Reach r = {0, element};
    for (int a = 0; a < t.rank; a++) {
      if (t.shape[a] <= 0) return {};
      const __int128 last = static_cast<__int128>(t.shape[a] - 1) * t.strides[a];
      if (last > INT64_MAX / 64 || last < INT64_MIN / 64) return Reach{0, __int128{1} << 80};
      (last < 0 ? r.low : r.high) += last * element;
    }
    return r;
  }

  // Gives the tensor memory for its whole extent, or none.
  void give_memory(const std::string &name) {
    strobe_tensor &t = call[name];
    const auto r = reach(t);
    if (!r || !t.data) return;
    if (r->high - r->low > (1 << 20)) {
      t.data = nullptr;
      return;
    }
    const int64_t element = bytes(static_cast<DType>(t.dtype));
    const __int128 at = static_cast<char *>(t.data) - call.data<char>(name);
    const bool misaligned = at % element != 0; // must be refused before the tensor is read
    if (misaligned || (at + r->low >= 0 && at + r->high <= static_cast<__int128>(call.memory_bytes(name)))) return;
    more.emplace_back(new unsigned char[static_cast<size_t>(r->high - r->low)]());
    t.data = more.back().get() - static_cast<int64_t>(r->low);
  }

  // Moves one tensor into the memory of another.
  void alias() {
    strobe_tensor &x = call[tensor()], &y = call[tensor()];
    const auto rx = reach(x), ry = reach(y);
    if (rx && ry && x.data && y.data && rx->low >= ry->low && rx->high <= ry->high) x.data = y.data;
  }
};

double work(Call &c) {
  double product = 1;
  for (const char *name : {"q", "k"})
    for (int a = 0; a < c[name].rank; a++) product *= static_cast<double>(std::max<int64_t>(1, c[name].shape[a]));
  return product;
}

} // namespace

TEST_CASE("fuzz: no crash, and statuses that agree") {
  const char *wanted = std::getenv("STROBE_FUZZ_ROUNDS");
  const int rounds = wanted ? std::atoi(wanted) : 4000;
  int good = 0, refused = 0;
  for (int n = 0; n < rounds; n++) {
    CAPTURE(n);
    Fuzzer fuzzer(static_cast<uint32_t>(n));
    Call &c = fuzzer.call;
    const int32_t operation = static_cast<int32_t>(c.operation);

    strobe_plan plan{};
    plan.size = sizeof plan;
    const int32_t planned = strobe_make_plan(&c.attention, &c.tensors, &c.execution, operation, &plan);
    const std::string why = planned == STROBE_OK ? "" : strobe_last_error();
    CAPTURE(why);
    REQUIRE((planned == STROBE_OK || planned == STROBE_INVALID_ARGUMENT || planned == STROBE_UNSUPPORTED));
    REQUIRE(why.empty() == (planned == STROBE_OK));
    if (planned == STROBE_INVALID_ARGUMENT) REQUIRE(rendered() == why);

    char text[512];
    size_t needed = 0;
    const int32_t explained = strobe_explain(&c.attention, &c.tensors, &c.execution, operation, text, sizeof text, &needed);
    REQUIRE(explained == (planned == STROBE_UNSUPPORTED ? STROBE_OK : planned));
    REQUIRE((explained != STROBE_OK || needed > 1));

    if (planned == STROBE_OK && (work(c) > 1e9 || plan.workspace_bytes > (64u << 20))) continue; // valid, but too much work for a test
    const int32_t ran = c.run();
    REQUIRE(ran == planned);
    if (ran == STROBE_OK) {
      good++;
    } else {
      REQUIRE(strobe_last_error() == why);
      REQUIRE(c.untouched());
      for (const std::string &line : lines(why)) REQUIRE(line.find(':') != std::string::npos);
      refused++;
    }
  }
  MESSAGE(good << " ran, " << refused << " were refused");
  CHECK(good > rounds / 10);
  CHECK(refused > rounds / 10);
}
