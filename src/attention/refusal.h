// A refusal as data: the argument, the kind of refusal, words with numbered places, and the values for these places. line() below makes a
// line of text from it; other languages make their own text from the same record (strobe_last_refusal in strobe.h).
#pragma once
#include <concepts>
#include <string>
#include <string_view>
#include <vector>

#include "attention/attention.h"

namespace strobe {

enum class Code : int32_t {
  missing = STROBE_CODE_MISSING,
  excluded = STROBE_CODE_EXCLUDED,
  version = STROBE_CODE_VERSION,
  value = STROBE_CODE_VALUE,
  unknown = STROBE_CODE_UNKNOWN,
  elsewhere = STROBE_CODE_ELSEWHERE,
  rank = STROBE_CODE_RANK,
  shape = STROBE_CODE_SHAPE,
  head_dim = STROBE_CODE_HEAD_DIM,
  heads = STROBE_CODE_HEADS,
  dtype = STROBE_CODE_DTYPE,
  device = STROBE_CODE_DEVICE,
  memory = STROBE_CODE_MEMORY,
  overlap = STROBE_CODE_OVERLAP,
  length = STROBE_CODE_LENGTH,
  list = STROBE_CODE_LIST,
  size = STROBE_CODE_SIZE
};

inline constexpr int64_t kAny = -1;

// An axis: its name in the documentation, and the required size. or_one: size 1 is accepted as well, and is broadcast.
struct Axis {
  const char *symbol;
  int64_t size = kAny;
  bool or_one = false;
};
using Axes = std::vector<Axis>;
using Types = std::vector<DType>;

// These values need a wrapper type. Integers, double, DType, Types, Axes, addresses and text are passed directly.
struct Argument { // the name of an argument; other languages may use another name
  const char *name;
};
struct Absent { // no value: None in Python, spelled in several ways in C
  const char *in_c;
};
struct Numbers { // a number for each axis of a tensor: sizes, or strides
  const int64_t *values;
  int32_t count;
};
struct AxisOf { // an axis of the refused tensor
  int32_t index;
};

struct Value {
  int32_t kind = 0;
  int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<int64_t> sizes;
  std::vector<const char *> roles; // roles of axes; each text exists as long as the library
  int32_t or_one = 0;

  strobe_value shown() const; // valid as long as this Value exists
};

Value value_of(int64_t);
Value value_of(double);
Value value_of(DType);
Value value_of(const Types &);
Value value_of(const Axes &);
Value value_of(Argument);
Value value_of(Absent);
Value value_of(Numbers);
Value value_of(AxisOf);
Value value_of(const void *address);
Value value_of(std::string_view text);
inline Value value_of(const char *text) { return value_of(std::string_view(text)); }
inline Value value_of(const std::string &text) { return value_of(std::string_view(text)); }
Value value_of(uint64_t); // becomes text if it does not fit 63 bits
template <std::integral T>
  requires(!std::same_as<T, bool> && !std::same_as<T, int64_t> && !std::same_as<T, uint64_t>) // messages use words for bools
Value value_of(T number) {
  return value_of(static_cast<int64_t>(number));
}

struct Refusal {
  const char *argument; // exists as long as the library
  Code code;
  const char *words; // "{0} heads; accepted is 1 or more"; exists as long as the library
  std::vector<Value> values;

  template <class... Values>
  Refusal(const char *argument, Code code, const char *words, const Values &...values)
      : argument(argument), code(code), words(words), values{value_of(values)...} {}
};

// "argument: words" with the values in their places, as C and C++ show it.
std::string line(const Refusal &);

// The error if arguments are wrong. Its text has a line for each refusal.
struct Refused : Error {
  std::vector<Refusal> refusals;
  explicit Refused(std::vector<Refusal> all);
};

template <class... Values> [[noreturn]] void refuse(const char *argument, Code code, const char *words, const Values &...values) {
  throw Refused({Refusal(argument, code, words, values...)});
}

} // namespace strobe
