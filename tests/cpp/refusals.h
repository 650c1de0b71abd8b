// The text of a failure, made only from its records, as a caller in another language can make it.
#pragma once
#include <doctest/doctest.h>

#include <cstdio>
#include <string>

#include "strobe/strobe.h"

namespace strobe::test {

inline std::string dtypes_in_words(const strobe_value &v) {
  const char *const names[] = {"none",  "float32", "float16", "bfloat16",      "float64", "bool",
                               "int32", "int64",   "int8",    "float8_e4m3fn", "uint8",   "float8_e5m2"};
  std::string all;
  for (size_t n = 0; n < v.count; n++) {
    const int64_t type = v.sizes[n];
    const bool is_known = type > 0 && type <= STROBE_FLOAT8_E5M2;
    all += n ? ", " : "";
    all += is_known ? names[type] : std::to_string(type) + (type ? " (unknown)" : " (none)");
  }
  return all;
}

inline std::string axes_in_words(const strobe_value &v) {
  std::string roles, sizes;
  bool any_known = false;
  for (size_t a = 0; a < v.count; a++) {
    const std::string comma = a ? ", " : "", one = (v.or_one >> a) & 1 ? "|1" : "";
    roles += comma + v.roles[a] + one;
    sizes += comma + (v.sizes[a] < 0 ? "any" : std::to_string(v.sizes[a]) + one);
    any_known |= v.sizes[a] >= 0;
  }
  return "(" + roles + ")" + (any_known ? " = (" + sizes + ")" : "");
}

inline std::string in_words(const strobe_value &v) {
  REQUIRE(v.size == sizeof(strobe_value));
  const bool has_sizes = v.kind == STROBE_VALUE_DTYPES || v.kind == STROBE_VALUE_SIZES || v.kind == STROBE_VALUE_AXES;
  REQUIRE((has_sizes || v.count == 0));
  REQUIRE((v.sizes != nullptr || v.count == 0));
  REQUIRE((v.roles != nullptr) == (v.kind == STROBE_VALUE_AXES));
  REQUIRE(v.text != nullptr);
  const char *const ordinals[] = {"first", "second", "third", "fourth"};
  char number[32];
  std::string all;
  switch (v.kind) {
  case STROBE_VALUE_INTEGER:
    return std::to_string(v.integer);
  case STROBE_VALUE_NUMBER:
    std::snprintf(number, sizeof number, "%g", v.number);
    return number;
  case STROBE_VALUE_DTYPES:
    return dtypes_in_words(v);
  case STROBE_VALUE_AXES:
    return axes_in_words(v);
  case STROBE_VALUE_AXIS:
    REQUIRE(v.integer >= 0);
    REQUIRE(v.integer < 4);
    return ordinals[v.integer];
  case STROBE_VALUE_SIZES:
    for (size_t a = 0; a < v.count; a++) all += (a ? ", " : "") + std::to_string(v.sizes[a]);
    return "(" + all + ")";
  }
  REQUIRE((v.kind == STROBE_VALUE_TEXT || v.kind == STROBE_VALUE_ARGUMENT || v.kind == STROBE_VALUE_ABSENT));
  return v.text;
}

// A line for each refusal of the last failure. Checks that each refusal has a code of the table and an argument, and that its words use its
// values.
inline std::string rendered() {
  std::string all;
  for (size_t n = 0; const strobe_refusal *r = strobe_last_refusal(n); n++) {
    REQUIRE(r->size == sizeof(strobe_refusal));
    REQUIRE(r->code >= STROBE_CODE_MISSING);
    REQUIRE(r->code <= STROBE_CODE_SIZE);
    REQUIRE(std::string(r->argument).find_first_of(": ") == std::string::npos);
    std::string line = r->words;
    for (int32_t v = 0; v < r->n_values; v++) {
      const std::string place = "{" + std::to_string(v) + "}", words = in_words(*r->values[v]);
      for (size_t at = 0; (at = line.find(place, at)) != std::string::npos; at += words.size()) line.replace(at, place.size(), words);
    }
    REQUIRE(line.find('{') == std::string::npos);
    all += (n ? "\n" : "") + std::string(r->argument) + ": " + line;
  }
  return all;
}

} // namespace strobe::test
