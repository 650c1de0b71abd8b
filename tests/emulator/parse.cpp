// Parses PTX as NVRTC writes it: one module, entries that call no functions, globals that are not used.
#include <charconv>

#include "opcodes.h"

namespace strobe::emulator {
namespace {

struct Token {
  std::string text; // empty at the end of the PTX
  uint32_t line;
};

bool is_word(char c) { return std::isalnum(uint8_t(c)) || c == '_' || c == '$' || c == '%' || c == '.'; }

std::vector<Token> tokens(const std::string &ptx) {
  std::vector<Token> all;
  uint32_t line = 1;
  for (size_t at = 0; at < ptx.size();) {
    const size_t begin = at;
    if (ptx[at] == '\n') line++;
    if (ptx.compare(at, 2, "//") == 0) {
      at = std::min(ptx.find('\n', at), ptx.size());
    } else if (std::isspace(uint8_t(ptx[at])) || ptx[at] == '\0') {
      at++;
    } else if (ptx[at] == '"') {
      at = std::min(ptx.find('"', at + 1), ptx.size() - 1) + 1;
      all.push_back({ptx.substr(begin, at - begin), line});
    } else {
      while (at < ptx.size() && (is_word(ptx[at]) || ptx.compare(at, 2, "::") == 0)) at += ptx[at] == ':' ? 2 : 1;
      at = std::max(at, begin + 1);
      all.push_back({ptx.substr(begin, at - begin), line});
    }
  }
  all.push_back({"", line});
  return all;
}

uint64_t aligned(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }

struct Scope {
  std::unordered_map<std::string, Operand> names;
  std::unordered_map<std::string, Operand> families; // %r<9> declares %r0 ... %r8; a register gets its slot when it is first named
  std::unordered_map<std::string, uint32_t> labels;
  std::vector<std::pair<uint32_t, std::string>> branches; // branches to labels that have not come yet
};

class Parser {
public:
  Parser(const std::string &ptx, Module &module) : tokens_(tokens(ptx)), module_(module) {}

  void parse() {
    scopes_.emplace_back();
    while (!peek().empty()) {
      const std::string word = next();
      if (word == ".version" || word == ".target" || word == ".address_size")
        next();
      else if (word == ".entry")
        parse_kernel();
      else if (word == ".shared" || word == ".extern")
        parse_shared(word == ".extern");
      else if (word == ".global")
        parse_global();
      else
        need(word == ".visible", ("the emulator does not know " + word).c_str());
    }
  }
  uint32_t line() const { return line_; } // the line of the last token

private:
  const std::string &peek() const { return tokens_[at_].text; }
  std::string next() {
    need(!peek().empty(), "it ends too early");
    line_ = tokens_[at_].line;
    return tokens_[at_++].text;
  }
  bool take(const char *what) { return peek() == what ? next(), true : false; }
  void expect(const char *what) { need(take(what), (std::string("wanted ") + what + ", found " + peek()).c_str()); }
  void skip_to(const char *what) {
    while (next() != what) {}
  }
  uint64_t integer() {
    const bool negative = take("-");
    const std::string word = next();
    const bool hexadecimal = word.starts_with("0x") || word.starts_with("0X");
    uint64_t value = 0;
    const char *end = word.data() + word.size() - (word.back() == 'U');
    const auto parsed = std::from_chars(word.data() + (hexadecimal ? 2 : 0), end, value, hexadecimal ? 16 : 10);
    need(parsed.ptr == end && parsed.ec == std::errc(), "wanted an integer");
    return negative ? 0 - value : value;
  }

  struct Variable {
    std::string name;
    uint64_t bytes, alignment;
  };
  // .align 8 .b8 name[952]   or   .u64 name
  Variable variable() {
    uint64_t alignment = 0;
    if (take(".align")) alignment = integer();
    const std::string type = next();
    const uint64_t size = std::stoul(type.substr(2)) / 8;
    Variable v{next(), size, alignment ? alignment : size};
    if (take("[")) {
      v.bytes = peek() == "]" ? 0 : size * integer();
      expect("]");
    }
    return v;
  }
  void name(const std::string &symbol, uint64_t value) { scopes_.back().names[symbol] = {.kind = Operand::kImmediate, .value = value}; }

  void parse_shared(bool is_extern) {
    if (is_extern) expect(".shared");
    const Variable v = variable();
    expect(";");
    need(is_extern || !dynamic_, "static shared memory is declared after dynamic");
    shared_ = aligned(shared_, is_extern ? std::max<uint64_t>(v.alignment, 16) : v.alignment);
    name(v.name, kSharedBegin + shared_);
    dynamic_ |= is_extern, shared_ += v.bytes;
  }

  // A constant of the program. Kernels read only constants that are zero; others are inlined.
  void parse_global() {
    const Variable v = variable();
    if (take("=")) return skip_to(";");
    expect(";");
    auto zeros = std::make_unique<std::byte[]>(v.bytes + v.alignment);
    name(v.name, aligned(reinterpret_cast<uint64_t>(zeros.get()), v.alignment));
    module_.globals.push_back(std::move(zeros));
  }

  void parse_kernel() {
    Kernel k{.name = next()};
    kernel_ = &k;
    scopes_.emplace_back();
    expect("(");
    while (!take(")")) {
      expect(".param");
      const Variable v = variable();
      const auto offset = uint32_t(aligned(k.info.argument_bytes, v.alignment));
      name(v.name, offset);
      k.info.parameters.push_back({offset, uint32_t(v.bytes)});
      k.info.argument_bytes = offset + uint32_t(v.bytes);
      take(",");
    }
    skip_to("{");
    for (size_t outside = scopes_.size() - 1; scopes_.size() > outside;) parse_statement();
    k.code.push_back({.kind = Instruction::kEnd, .line = line_});
    k.info.static_shared = uint32_t(shared_);
    module_.kernels.emplace(k.name, std::move(k));
  }

  void parse_statement() {
    const std::string word = next();
    if (word == "{") {
      scopes_.emplace_back();
    } else if (word == "}") {
      close_scope();
    } else if (word == ";") {
    } else if (word == ".reg") {
      parse_registers();
    } else if (word == ".local") {
      const Variable v = variable();
      const uint64_t offset = aligned(kernel_->local_bytes, v.alignment);
      name(v.name, offset), kernel_->local_bytes = uint32_t(aligned(offset + v.bytes, 16));
      expect(";");
    } else if (word == ".shared") {
      parse_shared(false);
    } else if (word == ".pragma") {
      skip_to(";");
    } else if (take(":")) {
      need(scopes_.back().labels.emplace(word, kernel_->code.size()).second, "a label stands twice");
    } else {
      parse_instruction(word);
    }
  }

  void close_scope() {
    Scope closed = std::move(scopes_.back());
    scopes_.pop_back();
    for (auto &[at, label] : closed.branches) {
      const auto found = closed.labels.find(label);
      if (found != closed.labels.end())
        kernel_->code[at].target = found->second;
      else
        need(scopes_.size() > 1, ("there is no label " + label).c_str()), scopes_.back().branches.emplace_back(at, label);
    }
  }

  void parse_registers() {
    const std::string type = next();
    Operand o{.kind = type == ".pred" ? Operand::kPredicate : Operand::kRegister, .bits = 1};
    if (type != ".pred") o.bits = uint8_t(std::stoi(type.substr(2)));
    do {
      const std::string name = next();
      if (take("<"))
        integer(), expect(">"), scopes_.back().families[name] = o;
      else
        o.slot = kernel_->new_slot(o.bits), scopes_.back().names[name] = o;
    } while (take(","));
    expect(";");
  }

  void parse_instruction(std::string word) {
    Instruction i{.line = line_};
    if (word == "@") {
      i.guarded = true, i.guard_negated = take("!");
      const Operand guard = named(next());
      need(guard.kind == Operand::kPredicate, "its guard is no predicate");
      i.guard = guard.slot, word = next();
    }
    if (word == "bra" || word == "bra.uni") {
      i.kind = Instruction::kBranch;
      scopes_.back().branches.emplace_back(kernel_->code.size(), next());
      expect(";");
    } else if (word == "ret" || word == "exit") {
      i.kind = Instruction::kEnd;
      expect(";");
    } else {
      std::vector<Operand> operands;
      while (!take(";")) {
        if (peek() == "%clock" || peek() == "%clock64" || peek() == "%globaltimer")
          word += next(); // becomes part of the opcode, because it is read again each time
        else
          operands.push_back(operand());
        if (peek() != ";") expect(",");
      }
      decode(*kernel_, i, word, operands);
    }
    kernel_->code.push_back(std::move(i));
  }

  Operand operand() {
    if (take("{")) {
      Operand vector{.kind = Operand::kVector};
      while (!take("}")) vector.parts.push_back(operand()), take(",");
      return vector;
    }
    if (take("[")) {
      Operand address = operand();
      need(address.kind == Operand::kRegister || address.kind == Operand::kImmediate, "its address is neither a register nor a variable");
      address.kind = Operand::kAddress;
      if (take("+") || peek() == "-") address.value += integer();
      if (take(",")) address.parts = operand().parts;
      expect("]");
      return address;
    }
    if (peek() == "-" || std::isdigit(uint8_t(peek()[0]))) return number();
    const Operand first = named(next());
    if (!take("|")) return first;
    return {.kind = Operand::kVector, .parts = {first, named(next())}};
  }

  Operand number() {
    const std::string &word = peek();
    const bool real = word.size() > 2 && word[0] == '0' && (word[1] == 'f' || word[1] == 'F' || word[1] == 'd' || word[1] == 'D');
    if (!real) return {.kind = Operand::kImmediate, .value = integer()};
    return {.kind = Operand::kImmediate, .value = std::stoull(next().substr(2), nullptr, 16)};
  }

  Operand named(const std::string &word) {
    if (word == "_") return {};
    const size_t digits = word.find_last_not_of("0123456789") + 1;
    for (size_t n = scopes_.size(); n-- > 0;) {
      Scope &scope = scopes_[n];
      if (const auto found = scope.names.find(word); found != scope.names.end()) return found->second;
      const auto family = digits < word.size() ? scope.families.find(word.substr(0, digits)) : scope.families.end();
      if (family == scope.families.end()) continue;
      Operand o = family->second;
      o.slot = kernel_->new_slot(o.bits);
      return scope.names[word] = o;
    }
    return special(word);
  }

  Operand special(const std::string &word) {
    static const std::unordered_map<std::string, Constant::Of> known = {{"%tid", Constant::kThread},
                                                                        {"%ntid", Constant::kThreads},
                                                                        {"%ctaid", Constant::kBlock},
                                                                        {"%nctaid", Constant::kBlocks},
                                                                        {"%laneid", Constant::kLane}};
    const std::vector<std::string> words = split(word, '.');
    const auto found = known.find(words[0]);
    need(found != known.end(), ("the emulator does not know " + word).c_str());
    Constant c{.of = found->second, .axis = uint8_t(words.size() > 1 ? words[1][0] - 'x' : 0)};
    c.slot = kernel_->new_slot(32);
    kernel_->constants.push_back(c);
    const Operand o{.kind = Operand::kRegister, .bits = 32, .slot = c.slot};
    return scopes_[1].names[word] = o;
  }

  const std::vector<Token> tokens_;
  Module &module_;
  size_t at_ = 0;
  uint32_t line_ = 1;
  std::vector<Scope> scopes_;
  Kernel *kernel_ = nullptr;
  uint64_t shared_ = 0;
  bool dynamic_ = false;
};

} // namespace

std::shared_ptr<const Module> parse(const std::string &ptx) {
  auto module = std::make_shared<Module>();
  module->lines = split(ptx, '\n');
  Parser parser(ptx, *module);
  try {
    parser.parse();
  } catch (const Fault &fault) {
    throw Fault("PTX line " + std::to_string(parser.line()) + " (" + module->lines[parser.line() - 1] + "): " + fault.what());
  }
  return module;
}

KernelInfo kernel_info(const Module &module, const std::string &kernel) {
  const auto found = module.kernels.find(kernel);
  if (found == module.kernels.end()) throw Fault("the module has no kernel named " + kernel);
  return found->second.info;
}

} // namespace strobe::emulator
