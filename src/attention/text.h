// Text for messages.
#pragma once
#include <charconv>
#include <concepts>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

namespace strobe {

// The number of significant digits for numbers that are not whole.
struct Digits {
  double value;
  int count = 6;
};

namespace detail {

inline void append(std::string &out, std::string_view part) { out += part; }
inline void append(std::string &out, const char *part) { out += part; }
inline void append(std::string &out, Digits number) {
  char digits[32];
  out.append(digits, std::to_chars(digits, std::end(digits), number.value, std::chars_format::general, number.count).ptr);
}
inline void append(std::string &out, const void *address) {
  char digits[32];
  out.append("0x").append(digits, std::to_chars(digits, std::end(digits), reinterpret_cast<uintptr_t>(address), 16).ptr);
}
inline void append(std::string &out, char part) { out += part; }
template <std::integral T>
  requires(!std::same_as<T, bool>) // messages use words for bools
void append(std::string &out, T number) {
  char digits[32];
  out.append(digits, std::to_chars(digits, std::end(digits), number).ptr);
}
inline void append(std::string &out, double number) { append(out, Digits{number}); }

} // namespace detail

// Joins the parts to one text. Engines describe plans and reasons on every call, so this uses no stream and no locale.
template <class... Parts> std::string text(const Parts &...parts) {
  std::string out;
  (detail::append(out, parts), ...);
  return out;
}

// "(2, 8, 128, 64)"
inline std::string tuple(const int64_t *values, int32_t count) {
  std::string out = "(";
  for (int32_t i = 0; i < count; i++) out += (i ? ", " : "") + std::to_string(values[i]);
  return out + ")";
}

} // namespace strobe
