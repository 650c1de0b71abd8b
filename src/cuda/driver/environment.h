// Environment variables. They are read at each use, but not when a loaded kernel runs again. All count as unset in a program that has more
// rights than its user (setuid).
#pragma once
#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

namespace strobe::cuda {

inline std::string environment(const char *name) {
  const char *value = secure_getenv(name);
  return value ? value : "";
}

inline bool environment_flag(const char *name) {
  const std::string value = environment(name);
  return !value.empty() && value != "0";
}

// The variable, split at colons, without empty entries.
inline std::vector<std::string> environment_list(const char *name) {
  std::vector<std::string> all;
  const std::string value = environment(name);
  for (size_t begin = 0; begin <= value.size();) {
    const size_t end = std::min(value.find(':', begin), value.size());
    if (end > begin) all.push_back(value.substr(begin, end - begin));
    begin = end + 1;
  }
  return all;
}

} // namespace strobe::cuda
