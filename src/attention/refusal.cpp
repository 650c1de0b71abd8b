#include "attention/refusal.h"

#include <algorithm>

#include "attention/text.h"

namespace strobe {
namespace {

constexpr int32_t kMostSizes = sizeof(strobe_value::sizes) / sizeof(int64_t); // entries of a value

Value made(int32_t kind) {
  Value value;
  value.is.size = sizeof value.is;
  value.is.kind = kind;
  return value;
}
Value made(int32_t kind, std::string_view text) {
  Value value = made(kind);
  value.own = text;
  return value;
}
template <class List, class Size> Value listed(int32_t kind, const List &list, Size &&size) {
  Value value = made(kind);
  for (const auto &x : list)
    if (value.is.count < kMostSizes) value.is.sizes[value.is.count++] = size(x);
  return value;
}

std::string type_in_words(DType type, bool is_known) {
  return is_known ? name(type) : text(static_cast<int32_t>(type), " (", name(type), ")");
}

std::string axes_in_words(const strobe_value &v) {
  std::string names, sizes;
  bool known = false;
  for (int32_t a = 0; a < v.count; a++) {
    const char *comma = a ? ", " : "", *one = v.or_one >> a & 1 ? "|1" : "";
    names += text(comma, v.roles[a], one);
    sizes += v.sizes[a] == kAny ? text(comma, "any") : text(comma, v.sizes[a], one);
    known |= v.sizes[a] != kAny;
  }
  return "(" + names + ")" + (known ? " = (" + sizes + ")" : "");
}

std::string in_words(const Value &value) {
  const strobe_value &v = value.is;
  switch (v.kind) {
  case STROBE_VALUE_INTEGER:
    return text(v.integer);
  case STROBE_VALUE_NUMBER:
    return text(v.number);
  case STROBE_VALUE_DTYPES: {
    std::string names;
    for (int32_t n = 0; n < v.count; n++) {
      const DType type = static_cast<DType>(v.sizes[n]);
      names += (n ? ", " : "") + type_in_words(type, bytes(type) > 0);
    }
    return names;
  }
  case STROBE_VALUE_SIZES:
    return tuple(v.sizes, v.count);
  case STROBE_VALUE_AXES:
    return axes_in_words(v);
  case STROBE_VALUE_AXIS: {
    constexpr const char *ordinals[] = {"first", "second", "third", "fourth"};
    return ordinals[v.integer & 3];
  }
  default:
    return value.own;
  }
}

} // namespace

Value value_of(int64_t number) {
  Value value = made(STROBE_VALUE_INTEGER);
  value.is.integer = number;
  return value;
}
Value value_of(uint64_t number) { return number <= INT64_MAX ? value_of(static_cast<int64_t>(number)) : value_of(text(number)); }
Value value_of(double number) {
  Value value = made(STROBE_VALUE_NUMBER);
  value.is.number = number;
  return value;
}
Value value_of(DType type) { return value_of(Types{type}); }
Value value_of(const Types &types) {
  return listed(STROBE_VALUE_DTYPES, types, [](DType type) { return static_cast<int64_t>(type); });
}
Value value_of(const Axes &axes) {
  Value value = listed(STROBE_VALUE_AXES, axes, [](const Axis &axis) { return axis.size; });
  for (int32_t a = 0; a < value.is.count; a++) {
    value.is.roles[a] = axes[a].symbol;
    value.is.or_one |= axes[a].or_one << a;
  }
  return value;
}
Value value_of(Argument argument) { return made(STROBE_VALUE_ARGUMENT, argument.name); }
Value value_of(Absent absent) { return made(STROBE_VALUE_ABSENT, absent.in_c); }
Value value_of(Numbers numbers) {
  Value value = made(STROBE_VALUE_SIZES);
  value.is.count = std::min(numbers.count, kMostSizes);
  std::copy_n(numbers.values, value.is.count, value.is.sizes);
  return value;
}
Value value_of(AxisOf axis) {
  Value value = made(STROBE_VALUE_AXIS);
  value.is.integer = axis.index;
  return value;
}
Value value_of(const void *address) { return made(STROBE_VALUE_TEXT, text(address)); }
Value value_of(std::string_view text) { return made(STROBE_VALUE_TEXT, text); }

std::string line(const Refusal &refusal) {
  std::string out = text(refusal.argument, ": ");
  for (const char *at = refusal.words; *at; at++) {
    const size_t n = static_cast<size_t>(at[0] == '{' ? at[1] - '0' : -1);
    if (n < refusal.values.size() && at[2] == '}')
      out += in_words(refusal.values[n]), at += 2;
    else
      out += *at;
  }
  return out;
}

static std::string lines(const std::vector<Refusal> &all) {
  std::string out;
  for (const Refusal &refusal : all) out += (out.empty() ? "" : "\n") + line(refusal);
  return out;
}

Refused::Refused(std::vector<Refusal> all) : Error(STROBE_INVALID_ARGUMENT, lines(all)), refusals(std::move(all)) {}

} // namespace strobe
