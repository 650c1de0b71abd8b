// JSON, as much as it takes to read a tuning table.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace strobe::cuda {

class Json {
public:
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json, std::less<>>;

  // Throws std::runtime_error that says what was expected at which byte.
  static Json parse(std::string_view text);

  // Throw std::runtime_error that names the member if it is missing or of another kind.
  const std::string &string(std::string_view member) const;
  double number(std::string_view member) const;
  bool boolean(std::string_view member) const;
  const Array &array(std::string_view member) const;

private:
  friend class JsonParser;
  template <class T> const T &get(std::string_view member, const char *kind) const;

  std::variant<std::nullptr_t, bool, double, std::string, Array, Object> value_ = nullptr;
};

} // namespace strobe::cuda
