#include "attention/refusal.h"

#include "attention/text.h"

namespace strobe {
namespace {

Value made(int32_t kind, std::string_view text = {}) {
  Value value;
  value.kind = kind, value.text = text;
  return value;
}
template <class List, class Size> Value listed(int32_t kind, const List &list, Size &&size) {
  Value value = made(kind);
  for (const auto &x : list) value.sizes.push_back(size(x));
  return value;
}

std::string type_in_words(DType type, bool is_known) {
  return is_known ? name(type) : text(static_cast<int32_t>(type), " (", name(type), ")");
}

std::string axes_in_words(const Value &v) {
  std::string names, sizes;
  bool known = false;
  for (size_t a = 0; a < v.sizes.size(); a++) {
    const char *comma = a ? ", " : "", *one = v.or_one >> a & 1 ? "|1" : "";
    names += text(comma, v.roles[a], one);
    sizes += v.sizes[a] == kAny ? text(comma, "any") : text(comma, v.sizes[a], one);
    known |= v.sizes[a] != kAny;
  }
  return "(" + names + ")" + (known ? " = (" + sizes + ")" : "");
}

std::string in_words(const Value &v) {
  switch (v.kind) {
  case STROBE_VALUE_INTEGER:
    return text(v.integer);
  case STROBE_VALUE_NUMBER:
    return text(v.number);
  case STROBE_VALUE_DTYPES: {
    std::string names;
    for (const int64_t n : v.sizes) {
      const DType type = static_cast<DType>(n);
      names += text(names.empty() ? "" : ", ", type_in_words(type, bytes(type) > 0));
    }
    return names;
  }
  case STROBE_VALUE_SIZES:
    return tuple(v.sizes.data(), static_cast<int32_t>(v.sizes.size()));
  case STROBE_VALUE_AXES:
    return axes_in_words(v);
  case STROBE_VALUE_AXIS: {
    constexpr const char *ordinals[] = {"first", "second", "third", "fourth"};
    return ordinals[v.integer & 3];
  }
  default:
    return v.text;
  }
}

} // namespace

strobe_value Value::shown() const {
  return {.size = sizeof(strobe_value),
          .kind = kind,
          .or_one = or_one,
          .integer = integer,
          .number = number,
          .text = text.c_str(),
          .count = sizes.size(),
          .sizes = sizes.data(),
          .roles = roles.empty() ? nullptr : roles.data()};
}

Value value_of(int64_t number) {
  Value value = made(STROBE_VALUE_INTEGER);
  value.integer = number;
  return value;
}
Value value_of(uint64_t number) { return number <= INT64_MAX ? value_of(static_cast<int64_t>(number)) : value_of(text(number)); }
Value value_of(double number) {
  Value value = made(STROBE_VALUE_NUMBER);
  value.number = number;
  return value;
}
Value value_of(DType type) { return value_of(Types{type}); }
Value value_of(const Types &types) {
  return listed(STROBE_VALUE_DTYPES, types, [](DType type) { return static_cast<int64_t>(type); });
}
Value value_of(const Axes &axes) {
  Value value = listed(STROBE_VALUE_AXES, axes, [](const Axis &axis) { return axis.size; });
  for (const Axis &axis : axes) {
    value.or_one |= axis.or_one << value.roles.size();
    value.roles.push_back(axis.symbol);
  }
  return value;
}
Value value_of(Argument argument) { return made(STROBE_VALUE_ARGUMENT, argument.name); }
Value value_of(Absent absent) { return made(STROBE_VALUE_ABSENT, absent.in_c); }
Value value_of(Numbers numbers) {
  Value value = made(STROBE_VALUE_SIZES);
  value.sizes.assign(numbers.values, numbers.values + numbers.count);
  return value;
}
Value value_of(AxisOf axis) {
  Value value = made(STROBE_VALUE_AXIS);
  value.integer = axis.index;
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
