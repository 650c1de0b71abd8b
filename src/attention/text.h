// Text for messages.
#pragma once
#include <cstdint>
#include <sstream>
#include <string>

namespace strobe {

template <class... Parts> std::string text(const Parts &...parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  (out << ... << parts);
  return out.str();
}

// "(2, 8, 128, 64)"
inline std::string tuple(const int64_t *values, int32_t count) {
  std::string out = "(";
  for (int32_t i = 0; i < count; i++) out += (i ? ", " : "") + std::to_string(values[i]);
  return out + ")";
}

} // namespace strobe
