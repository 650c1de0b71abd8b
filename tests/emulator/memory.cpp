// Loads, stores, atomics, generic addresses, fences.
#include <sys/mman.h>

#include <cstdio>

#include "opcodes.h"

namespace strobe::emulator {
namespace {

enum Space : uint8_t { kGlobal, kShared, kParam, kLocal }; // a generic address is a global address

std::string hexadecimal(uint64_t x) {
  char text[20];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(x));
  return text;
}
std::string range(uint64_t address, size_t bytes, size_t alignment) {
  return std::to_string(bytes) + " bytes at " + hexadecimal(address) + " (to be aligned to " + std::to_string(alignment) + ")";
}

template <Space space, Access access> std::byte *at(const Warp &w, uint32_t lane, uint64_t address, size_t bytes) {
  if constexpr (space == kGlobal) return global(address, bytes, bytes);
  if constexpr (space == kShared) return w.shared(address, bytes, bytes, access, lane);
  if constexpr (space == kParam) {
    Grid &grid = w.block.grid;
    if (address + bytes > grid.argument_bytes || address % bytes)
      throw Fault(range(address, bytes, bytes) + " of " + std::to_string(grid.argument_bytes) + " of arguments");
    return reinterpret_cast<std::byte *>(grid.arguments.data()) + address;
  }
  if (address + bytes > w.local_bytes || address % bytes)
    throw Fault(range(address, bytes, bytes) + " of " + std::to_string(w.local_bytes) + " of local memory");
  return w.local + size_t(lane) * w.local_bytes + address;
}

uint64_t address(const Warp &w, const Instruction &i, uint32_t lane) {
  if (i.address == kNoSlot) return i.offset;
  return i.wide ? w.lanes<uint64_t>(i.address)[lane] + i.offset : uint32_t(w.lanes<uint32_t>(i.address)[lane] + i.offset);
}

template <Space space, class T, class R> void load(Warp &w, const Instruction &i, uint32_t lanes) {
  each(lanes, [&](uint32_t lane) {
    const std::byte *from = at<space, Access::kRead>(w, lane, address(w, i, lane), i.count * sizeof(T));
    for (int n = 0; n < i.count; n++) {
      T value;
      std::memcpy(&value, from + n * sizeof(T), sizeof(T));
      if (i.a[n] != kNoSlot) w.lanes<R>(i.a[n])[lane] = R(value);
    }
  });
}
// A load from memory that other warps may write meanwhile. These warps run before the load is repeated.
template <Space space, class T, class R> void load_waiting(Warp &w, const Instruction &i, uint32_t lanes) {
  load<space, T, R>(w, i, lanes), w.waits = true;
}
template <Space space, class T, class R> void store(Warp &w, const Instruction &i, uint32_t lanes) {
  w.block.grid.changes++;
  each(lanes, [&](uint32_t lane) {
    T values[4];
    for (int n = 0; n < i.count; n++) values[n] = T(w.lanes<R>(i.a[n])[lane]);
    const size_t bytes = i.count * sizeof(T);
    std::byte *to = at<space, Access::kSynchronize>(w, lane, address(w, i, lane), bytes);
    if (w.block.races && std::memcmp(to, values, bytes) == 0) return; // no thread can notice a write of equal values
    at<space, Access::kWrite>(w, lane, address(w, i, lane), bytes);
    std::memcpy(to, values, bytes);
  });
}

struct Form {
  bool stores = false, waits = false;
  Space space = kGlobal;
  uint8_t bits = 32;
};
template <Space space, class T, class R> Execute access(const Form &a) {
  return a.stores ? store<space, T, R> : a.waits ? load_waiting<space, T, R> : load<space, T, R>;
}
template <Space space, class T> Execute access(const Form &a) {
  if (a.bits == 64) return access<space, T, uint64_t>(a);
  if constexpr (sizeof(T) <= 4)
    if (a.bits == 32) return access<space, T, uint32_t>(a);
  if constexpr (sizeof(T) <= 2)
    if (a.bits == 16) return access<space, T, uint16_t>(a);
  throw Fault("a register of " + std::to_string(a.bits) + " bits is too narrow");
}
template <class T> Execute access(const Form &a) {
  switch (a.space) {
  case kGlobal:
    return access<kGlobal, T>(a);
  case kShared:
    return access<kShared, T>(a);
  case kParam:
    return access<kParam, T>(a);
  default:
    return access<kLocal, T>(a);
  }
}
Execute access(const Form &a, const std::string &type) {
  if (type == "s8") return access<int8_t>(a);
  if (type == "s16") return access<int16_t>(a);
  if (type == "s32") return access<int32_t>(a);
  const std::string width = type.substr(1);
  need(type[0] == 'b' || type[0] == 'u' || type[0] == 'f' || type == "s64", "its type is not known");
  if (width == "8") return access<uint8_t>(a);
  if (width == "16") return access<uint16_t>(a);
  if (width == "32") return access<uint32_t>(a);
  need(width == "64", "its type is not known");
  return access<uint64_t>(a);
}

void decode_access(Kernel &k, Instruction &i, const std::vector<std::string> &words, const std::vector<Operand> &operands) {
  need(operands.size() == 2, "wants two operands");
  Form a{.stores = words[0] == "st"};
  for (size_t n = 1; n + 1 < words.size(); n++) {
    const std::string &word = words[n];
    if (word == "shared" || word == "shared::cta")
      a.space = kShared;
    else if (word == "param")
      a.space = kParam;
    else if (word == "local")
      a.space = kLocal;
    else if (word == "v2" || word == "v4")
      i.count = word[1] - '0';
    else if (word == "volatile" || word == "relaxed" || word == "acquire")
      a.waits = true;
    else
      need(word == "global" || word == "gpu" || word == "release" || word == "nc" || word == "cg", "a modifier is not known");
  }
  const Operand &data = operands[a.stores];
  const std::vector<Operand> elements = i.count == 1 ? std::vector{data} : data.parts;
  need(elements.size() == i.count, "the vector is of another length");
  const std::string &type = words.back();
  a.bits = type.back() == '8' ? 16 : std::stoi(type.substr(1));
  for (const Operand &e : elements)
    if (e.kind == Operand::kRegister) a.bits = e.bits;
  for (int n = 0; n < i.count; n++) i.a[n] = a.stores ? source(k, elements[n], a.bits) : destination(elements[n], a.bits);
  set_address(i, operands[!a.stores]);
  i.execute = access(a, type);
}

// Each lane in turn changes `count` elements, one after another. If an operation that returns a value changes nothing, it may be an attempt
// in a loop, so other warps run before the next attempt.
template <class T, auto f, bool returns> void atomic(Warp &w, const Instruction &i, uint32_t lanes) {
  bool changed = false;
  each(lanes, [&](uint32_t lane) {
    std::byte *to = global(address(w, i, lane), i.count * sizeof(T), i.count * sizeof(T));
    for (int n = 0; n < i.count; n++) {
      T before, after;
      std::memcpy(&before, to + n * sizeof(T), sizeof(T));
      if constexpr (std::is_invocable_v<decltype(f), T, T, T>)
        after = f(before, w.lanes<T>(i.a[0])[lane], w.lanes<T>(i.a[1])[lane]);
      else
        after = f(before, w.lanes<T>(i.a[n])[lane]);
      std::memcpy(to + n * sizeof(T), &after, sizeof(T));
      changed |= std::memcmp(&before, &after, sizeof(T)) != 0;
      if constexpr (returns) w.lanes<T>(i.d)[lane] = before;
    }
  });
  w.block.grid.changes += changed;
  w.waits |= returns && !changed;
}

template <class T> T sum(T a, T b) { return a + b; }
template <class T> T disjunction(T a, T b) { return a | b; }
Pair swap_if_equal(Pair before, Pair expected, Pair wanted) {
  return before.low == expected.low && before.high == expected.high ? wanted : before;
}

struct Atomic {
  Execute atom, red;
  uint8_t bits;
};
template <class T, auto f> constexpr Atomic both() { return {atomic<T, f, true>, atomic<T, f, false>, kBits<T>}; }

void decode_atomic(Kernel &k, Instruction &i, const std::vector<std::string> &words, const std::vector<Operand> &operands) {
  static const std::unordered_map<std::string, Atomic> known = {{"add.f32", both<float, sum<float>>()},
                                                                {"add.f64", both<double, sum<double>>()},
                                                                {"add.u32", both<uint32_t, sum<uint32_t>>()},
                                                                {"or.b32", both<uint32_t, disjunction<uint32_t>>()},
                                                                {"cas.b128", both<Pair, swap_if_equal>()}};
  const bool returns = words[0] == "atom";
  std::string what;
  for (size_t n = 1; n < words.size(); n++) {
    if (words[n] == "v2" || words[n] == "v4")
      i.count = words[n][1] - '0';
    else if (words[n] != "relaxed" && words[n] != "release" && words[n] != "gpu" && words[n] != "global")
      what += (what.empty() ? "" : ".") + words[n];
  }
  const auto found = known.find(what);
  need(found != known.end(), "this atomic operation is not known");
  need(operands.size() == 2u + returns + (what == "cas.b128"), "wants another number of operands");
  set_address(i, operands[returns]);
  if (returns) i.d = destination(operands[0], found->second.bits);
  std::vector<Operand> values = i.count > 1 ? operands[1 + returns].parts : std::vector(operands.begin() + 1 + returns, operands.end());
  need(i.count == 1 || values.size() == i.count, "the vector is of another length");
  for (size_t n = 0; n < values.size(); n++) i.a[n] = source(k, values[n], found->second.bits);
  i.execute = returns ? found->second.atom : found->second.red;
}

// Converts an address in a space to a generic address, or back.
template <Space space, bool back> void convert_address(Warp &w, const Instruction &i, uint32_t lanes) {
  each(lanes, [&](uint32_t lane) {
    uint64_t zero = 0; // the generic address of address 0 of the space
    if constexpr (space == kShared) zero = reinterpret_cast<uint64_t>(w.block.shared) - kSharedBegin;
    if constexpr (space == kParam) zero = reinterpret_cast<uint64_t>(w.block.grid.arguments.data());
    if constexpr (space == kLocal) zero = reinterpret_cast<uint64_t>(w.local + size_t(lane) * w.local_bytes);
    w.lanes<uint64_t>(i.d)[lane] = w.lanes<uint64_t>(i.a[0])[lane] + (back ? 0 - zero : zero);
  });
}

void let_next_begin(Warp &w, const Instruction &, uint32_t) { w.block.lets_next_begin = true; }
void wait_for_launch_before(Warp &w, const Instruction &, uint32_t) { w.block.waited = true; } // the previous launch has ended
void proxy_fence(Warp &w, const Instruction &, uint32_t lanes) {
  if (w.block.races) w.block.races->fence(w.index, lanes);
}
void wait(Warp &w, const Instruction &, uint32_t) { w.waits = true; }

} // namespace

void Warp::bad_shared(uint64_t address, size_t bytes, size_t alignment) const {
  throw Fault(range(address, bytes, alignment) + ", and shared memory is " + hexadecimal(kSharedBegin) + " to " +
              hexadecimal(block.shared_end));
}
bool is_mapped(uint64_t page) {
  if (page == 0 || msync(reinterpret_cast<void *>(page * kPage), kPage, MS_ASYNC)) return false;
  return mapped_pages[page % 64] = ~page, true;
}
void bad_global(uint64_t address, size_t bytes, size_t alignment) { throw Fault(range(address, bytes, alignment) + " of global memory"); }

bool decode_memory(Kernel &k, Instruction &i, const std::string &opcode, const std::vector<Operand> &operands) {
  static const std::unordered_map<std::string, Execute> addresses = {
      {"cvta.to.global.u64", convert_address<kGlobal, true>}, {"cvta.global.u64", convert_address<kGlobal, false>},
      {"cvta.to.shared.u64", convert_address<kShared, true>}, {"cvta.shared.u64", convert_address<kShared, false>},
      {"cvta.param.u64", convert_address<kParam, false>},     {"cvta.to.local.u64", convert_address<kLocal, true>},
      {"cvta.local.u64", convert_address<kLocal, false>}};
  // Memory has only one order here, that of execution. Fences matter only to the search for races.
  static const std::unordered_map<std::string, Execute> effects = {{"membar.gl", nothing},
                                                                   {"membar.cta", nothing},
                                                                   {"fence.acq_rel.gpu", nothing},
                                                                   {"fence.proxy.async", proxy_fence},
                                                                   {"fence.proxy.async.global", nothing},
                                                                   {"fence.proxy.async.shared::cta", proxy_fence},
                                                                   {"fence.mbarrier_init.release.cluster", nothing},
                                                                   {"griddepcontrol.wait", wait_for_launch_before},
                                                                   {"griddepcontrol.launch_dependents", let_next_begin},
                                                                   {"nanosleep.u32", wait}};
  const std::vector<std::string> words = split(opcode, '.');
  if (words[0] == "ld" || words[0] == "st") return decode_access(k, i, words, operands), true;
  if (words[0] == "atom" || words[0] == "red") return decode_atomic(k, i, words, operands), true;
  if (const auto found = addresses.find(opcode); found != addresses.end()) {
    need(operands.size() == 2, "wants two operands");
    i.execute = found->second, i.d = destination(operands[0], 64), i.a[0] = source(k, operands[1], 64);
    return true;
  }
  const auto found = effects.find(opcode);
  if (found != effects.end()) i.execute = found->second;
  return found != effects.end();
}

} // namespace strobe::emulator
