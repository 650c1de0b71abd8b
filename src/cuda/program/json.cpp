#include "cuda/program/json.h"

#include <charconv>
#include <stdexcept>

#include "attention/text.h"

namespace strobe::cuda {

class JsonParser {
public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  Json document() {
    Json value = parse(0);
    space();
    if (at_ != text_.size()) fail("the end");
    return value;
  }

private:
  static constexpr int kDepth = 16; // of nesting; a table has 3

  [[noreturn]] void fail(const char *expected) const { throw std::runtime_error(text("byte ", at_, ": expected ", expected)); }
  void space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) at_++;
  }
  bool take(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  bool next(char c) {
    space();
    return take({&c, 1});
  }

  Json parse(int depth) {
    if (depth > kDepth) fail("less nesting");
    space();
    Json json;
    if (take("null")) return json;
    if (take("true"))
      json.value_ = true;
    else if (take("false"))
      json.value_ = false;
    else if (take("\""))
      json.value_ = string();
    else if (take("["))
      json.value_ = array(depth);
    else if (take("{"))
      json.value_ = object(depth);
    else
      json.value_ = number();
    return json;
  }

  Json::Array array(int depth) {
    Json::Array all;
    if (next(']')) return all;
    do all.push_back(parse(depth + 1));
    while (next(','));
    if (!next(']')) fail("]");
    return all;
  }
  Json::Object object(int depth) {
    Json::Object all;
    if (next('}')) return all;
    do {
      if (!next('"')) fail("\"");
      std::string name = string();
      if (!next(':')) fail(":");
      all[std::move(name)] = parse(depth + 1);
    } while (next(','));
    if (!next('}')) fail("}");
    return all;
  }
  std::string string() {
    std::string all;
    for (;; at_++) {
      if (at_ == text_.size()) fail("\"");
      const char c = text_[at_];
      if (c == '"') break;
      if (static_cast<unsigned char>(c) < ' ') fail("no control character");
      if (c != '\\') {
        all += c;
      } else if (++at_ < text_.size() && std::string_view("\"\\/").find(text_[at_]) != std::string_view::npos) {
        all += text_[at_];
      } else {
        fail("one of \\\" \\\\ \\/"); // all that a table's names may need
      }
    }
    at_++;
    return all;
  }
  double number() {
    double value = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc()) fail("a value");
    at_ = static_cast<size_t>(end - text_.data());
    return value;
  }

  std::string_view text_;
  size_t at_ = 0;
};

Json Json::parse(std::string_view text) { return JsonParser(text).document(); }

template <class T> const T &Json::get(std::string_view member, const char *kind) const {
  if (const Object *object = std::get_if<Object>(&value_))
    if (const auto found = object->find(member); found != object->end())
      if (const T *value = std::get_if<T>(&found->second.value_)) return *value;
  throw std::runtime_error(text("\"", member, "\" is missing, or not ", kind));
}

const std::string &Json::string(std::string_view member) const { return get<std::string>(member, "a string"); }
double Json::number(std::string_view member) const { return get<double>(member, "a number"); }
bool Json::boolean(std::string_view member) const { return get<bool>(member, "true or false"); }
const Json::Array &Json::array(std::string_view member) const { return get<Array>(member, "a list"); }

} // namespace strobe::cuda
