// Each option of strobe.hpp reaches its member of strobe.h, and no other member.
#include <strobe/strobe.hpp>

#include <cstdio>
#include <cstring>

static int failures = 0;

static void check(bool good, const char *otherwise) {
  if (!good) std::printf("%s\n", otherwise), failures++;
}

// Values that are not defaults. In strobe.h a flag is 1, and an enumerator is its number.
static const float element = 0;
static const strobe::ConstTensor tensor(std::span(&element, 1), {1});
static void set(bool &x) { x = true; }
static void set(double &x) { x = 0.5; }
static void set(int32_t &x) { x = 3; }
static void set(int64_t &x) { x = 5; }
static void set(uint64_t &x) { x = 7; }
static void set(strobe::Alignment &x) { x = strobe::Alignment::top_left; }
static void set(strobe::Score &x) { x = strobe::Score::hyperbolic; }
static void set(std::string &x) { x = "an engine"; }
static void set(strobe::ConstTensor &x) { x = tensor; }
static void set(strobe::Tensor &x) { x = strobe::Tensor(*tensor.get("")); }
static void set(void *&x) { x = &failures; }
static void set(strobe_parallel &x) {
  x = [](void *, int32_t, void (*)(void *, int32_t), void *) {};
}
static void set(void *(*&x)(void *, uint64_t)) {
  x = [](void *, uint64_t) -> void * { return nullptr; };
}
static void set(strobe::Part &x) {
#define STROBE_PART(name) set(x.name);
#define STROBE_PART_RESERVED(name)
#include <strobe/fields.inc>
}
static void set(strobe::Function &x) { x.nodes.emplace_back().operation = STROBE_OP_SCORE; }
template <class T> static void set(std::optional<T> &x) { set(x.emplace()); }

template <class T> static bool is(int32_t x, const T &from) { return x == static_cast<int32_t>(from); }
static bool is(double x, double from) { return x == from; }
static bool is(int64_t x, int64_t from) { return x == from; }
static bool is(uint64_t x, uint64_t from) { return x == from; }
static bool is(const char *x, const std::string &from) { return x && x == from; }
static bool is(const strobe_tensor *x, const strobe::ConstTensor &from) { return x && x == from.get(""); }
template <class T>
  requires std::is_pointer_v<T>
static bool is(T x, T from) {
  return x && x == from;
}
static bool is(const strobe_part *x, const std::optional<strobe::Part> &from) {
  if (!x || x->size != sizeof *x || x->reserved) return false;
#define STROBE_PART(name)                                                                                                                  \
  if (!is(x->name, from->name)) return false;
#define STROBE_PART_RESERVED(name)
#include <strobe/fields.inc>
  return true;
}
static bool is(const strobe_function *x, const std::optional<strobe::Function> &from) {
  return x && x->size == sizeof *x && x->n_nodes == 1 && x->nodes == from->nodes.data();
}

// Whether all bytes after the size are 0, except for those of the given members.
template <class Raw, class... Members> static bool zero_but(const Raw &raw, const Members &...members) {
  Raw rest;
  std::memcpy(static_cast<void *>(&rest), static_cast<const void *>(&raw), sizeof raw);
  auto clear = [&](const auto &member) {
    const auto at = reinterpret_cast<const char *>(&member) - reinterpret_cast<const char *>(&raw);
    std::memset(reinterpret_cast<char *>(&rest) + at, 0, sizeof member);
  };
  clear(raw.size), (clear(members), ...);
  for (size_t n = 0; n < sizeof rest; n++)
    if (reinterpret_cast<const char *>(&rest)[n]) return false;
  return raw.size == sizeof raw;
}

// Sets an option of a `Given`, and checks the struct that `make`, an expression of the variable `given`, produces.
#define HANDED_ON(Struct, Given, name, make)                                                                                               \
  {                                                                                                                                        \
    Given given;                                                                                                                           \
    set(given.name);                                                                                                                       \
    const Struct &made = make;                                                                                                             \
    check(is(made.name, given.name), #name " of " #Given " is not handed on");                                                             \
    check(zero_but(made, made.name), #name " of " #Given " sets another member");                                                          \
  }

int main() {
  using namespace strobe::api;
  using strobe::detail::raw, strobe::detail::RawAttention;
  const strobe_attention &defaults = RawAttention(Attention{});
  check(zero_but(defaults), "a default is not zero");

#define STROBE_OPTION(name) HANDED_ON(strobe_attention, Attention, name, RawAttention(given))
#define STROBE_BACKWARD_MODE(name) HANDED_ON(strobe_attention, Backward, name, RawAttention(Attention{}, given))
#define STROBE_RESERVED(name)
#define STROBE_OPTIONAL(name)                                                                                                              \
  {                                                                                                                                        \
    Attention given;                                                                                                                       \
    set(given.name);                                                                                                                       \
    const strobe_attention &made = RawAttention(given);                                                                                    \
    check(made.has_##name == 1 && is(made.name, *given.name), #name " is not handed on");                                                  \
    check(zero_but(made, made.name, made.has_##name), #name " sets another member");                                                       \
  }
#include <strobe/fields.inc>

#define STROBE_INPUT(name, place)                                                                                                          \
  HANDED_ON(strobe_tensors, Attention, name, raw(given, Forward{}))                                                                        \
  HANDED_ON(strobe_tensors, Attention, name, raw(given, Backward{}))
#define STROBE_FORWARD(name, place) HANDED_ON(strobe_tensors, Forward, name, raw(Attention{}, given))
#define STROBE_BACKWARD(name, place) HANDED_ON(strobe_tensors, Backward, name, raw(Attention{}, given))
#define STROBE_RESULT(name, place) STROBE_FORWARD(name, place) STROBE_BACKWARD(name, place)
#include <strobe/fields.inc>

#define STROBE_EXECUTION(name) HANDED_ON(strobe_execution, Execution, name, raw(given))
#define STROBE_WORKSPACE(name)
#include <strobe/fields.inc>
  std::byte memory[8];
  const strobe_execution execution = raw(Execution{.workspace = memory});
  check(execution.workspace == memory && execution.workspace_bytes == sizeof memory, "workspace is not handed on");
  return failures ? 1 : 0;
}
