// From an opcode and its operands to the function that executes the instruction.
#include "opcodes.h"

namespace strobe::emulator {
namespace {

const Opcodes &opcodes() {
  static const Opcodes all = [] {
    Opcodes o;
    add_integer(o), add_floating(o), add_conversions(o);
    return o;
  }();
  return all;
}

bool decode_mapped(Kernel &k, Instruction &i, const std::string &opcode, const std::vector<Operand> &operands) {
  auto found = opcodes().find(opcode);
  if (found != opcodes().end() && opcode.starts_with("cvt.") && operands.size() == 2 && operands[1].bits > found->second.a[0])
    found = opcodes().find(opcode + "@" + std::to_string(operands[1].bits));
  if (found == opcodes().end()) return false;
  const Opcode &o = found->second;
  size_t count = 0;
  while (count < 4 && o.a[count]) count++;
  need(operands.size() == count + 1, "wants another number of operands");
  i.execute = o.execute, i.d = destination(operands[0], o.d);
  need(i.d != kNoSlot, "its result goes to no register");
  for (size_t n = 0; n < count; n++) i.a[n] = source(k, operands[n + 1], o.a[n]);
  return true;
}

// mov between a register and its two halves, the lower half first.
template <class T, class Part> void join(Warp &w, const Instruction &i, uint32_t lanes) {
  each(lanes, [&](uint32_t lane) {
    const Part parts[2] = {w.lanes<Part>(i.a[0])[lane], w.lanes<Part>(i.a[1])[lane]};
    std::memcpy(&w.lanes<T>(i.d)[lane], parts, sizeof(T));
  });
}
template <class T, class Part> void part(Warp &w, const Instruction &i, uint32_t lanes) {
  each(lanes, [&](uint32_t lane) {
    Part parts[2];
    std::memcpy(parts, &w.lanes<T>(i.a[0])[lane], sizeof(T));
    if (i.d != kNoSlot) w.lanes<Part>(i.d)[lane] = parts[0];
    if (i.d2 != kNoSlot) w.lanes<Part>(i.d2)[lane] = parts[1];
  });
}

bool decode_parts(Kernel &k, Instruction &i, const std::string &opcode, const std::vector<Operand> &operands) {
  if (!opcode.starts_with("mov.b") || operands.size() != 2) return false;
  const bool joins = operands[1].kind == Operand::kVector;
  if (!joins && operands[0].kind != Operand::kVector) return false;
  const uint8_t bits = std::stoi(opcode.substr(5)), half = bits / 2;
  const std::vector<Operand> &parts = operands[joins].parts;
  need(parts.size() == 2 && (bits == 32 || bits == 64 || bits == 128), "wants two parts");
  if (joins) {
    i.d = destination(operands[0], bits), i.a[0] = source(k, parts[0], half), i.a[1] = source(k, parts[1], half);
    i.execute = bits == 32 ? join<uint32_t, uint16_t> : bits == 64 ? join<uint64_t, uint32_t> : join<Pair, uint64_t>;
  } else {
    i.d = destination(parts[0], half), i.d2 = destination(parts[1], half), i.a[0] = source(k, operands[1], bits);
    i.execute = bits == 32 ? part<uint32_t, uint16_t> : bits == 64 ? part<uint64_t, uint32_t> : part<Pair, uint64_t>;
  }
  return true;
}

void execute_tile(Warp &w, const Instruction &i, uint32_t lanes) { (*i.tile)(w, lanes); }

bool decode_as_tile(Instruction &i, const std::string &opcode, const std::vector<Operand> &operands) {
  Tile tile = decode_tile(opcode, operands);
  if (!tile) return false;
  i.tile = std::make_shared<const Tile>(std::move(tile)), i.execute = execute_tile;
  if (opcode.find(".aligned") != opcode.npos) i.kind = Instruction::kAligned;
  return true;
}

} // namespace

void need(bool holds, const char *what) {
  if (!holds) throw Fault(what);
}

std::vector<std::string> split(const std::string &text, char at) {
  std::vector<std::string> parts(1);
  for (char c : text)
    if (c == at)
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

uint32_t Kernel::constant(uint64_t value, uint8_t bits) {
  if (bits < 64) value &= (uint64_t(1) << bits) - 1;
  for (const Constant &c : constants)
    if (c.of == Constant::kNumber && c.bits == bits && c.value == value) return c.slot;
  constants.push_back({.bits = bits, .value = value, .slot = new_slot(bits)});
  return constants.back().slot;
}

uint32_t source(Kernel &k, const Operand &o, uint8_t bits) {
  if (o.kind == Operand::kImmediate) return bits == 1 ? k.constant(o.value & 1 ? kAllLanes : 0, 32) : k.constant(o.value, bits);
  need(o.kind == Operand::kRegister || o.kind == Operand::kPredicate, "an operand is neither a register nor a number");
  if (o.bits != bits) throw Fault("a register of " + std::to_string(o.bits) + " bits where one of " + std::to_string(bits) + " is wanted");
  return o.slot;
}
uint32_t destination(const Operand &o, uint8_t bits) {
  if (o.kind == Operand::kSink) return kNoSlot;
  need(o.kind == Operand::kRegister || o.kind == Operand::kPredicate, "its result goes to no register");
  if (o.bits != bits) throw Fault("a result of " + std::to_string(bits) + " bits for a register of " + std::to_string(o.bits));
  return o.slot;
}
void set_address(Instruction &i, const Operand &o) {
  need(o.kind == Operand::kAddress && o.parts.empty(), "wants an address");
  i.address = o.slot, i.offset = int64_t(o.value), i.wide = o.bits == 64;
}

void decode(Kernel &k, Instruction &i, const std::string &opcode, const std::vector<Operand> &operands) {
  const bool known = decode_parts(k, i, opcode, operands) || decode_mapped(k, i, opcode, operands) ||
                     decode_memory(k, i, opcode, operands) || decode_warp(k, i, opcode, operands) ||
                     decode_barrier(k, i, opcode, operands) || decode_as_tile(i, opcode, operands);
  if (!known) throw Fault("the emulator does not know this instruction");
}

} // namespace strobe::emulator
