// How most instructions are made: a function of a lane's operands is applied to the lanes.
#pragma once
#include <cstring>
#include <string>
#include <tuple>
#include <unordered_map>

#include "program.h"

namespace strobe::emulator {

struct Pair {
  uint64_t low, high;
};

template <class T> struct Source {
  const T *values;
  Source(const Warp &w, uint32_t slot) : values(w.lanes<T>(slot)) {}
  T operator[](uint32_t lane) const { return values[lane]; }
};
template <> struct Source<bool> {
  uint32_t mask;
  Source(const Warp &w, uint32_t slot) : mask(*w.lanes<uint32_t>(slot)) {}
  bool operator[](uint32_t lane) const { return mask >> lane & 1; }
};

inline void write_mask(const Warp &w, uint32_t slot, uint32_t lanes, uint32_t mask) {
  uint32_t &d = *w.lanes<uint32_t>(slot);
  d = (d & ~lanes) | (mask & lanes);
}
template <class T> void write(const Warp &w, uint32_t slot, uint32_t lanes, const T (&values)[kLanes]) {
  T *d = w.lanes<T>(slot);
  if (lanes == kAllLanes) {
    std::memcpy(d, values, sizeof(values));
    return;
  }
  for (uint32_t lane = 0; lane < kLanes; lane++)
    if (lanes >> lane & 1) d[lane] = values[lane];
}
template <class F> void each(uint32_t lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(uint32_t(__builtin_ctz(lanes)));
}

// D = f(S...). It is computed for every lane, because it has no side effects, and written for the lanes that execute it.
template <auto f, class D, class... S, size_t... n>
void map_lanes(Warp &w, const Instruction &i, uint32_t lanes, std::index_sequence<n...>) {
  const std::tuple<Source<S>...> s{Source<S>(w, i.a[n])...};
  if constexpr (std::is_same_v<D, bool>) {
    uint32_t mask = 0;
    for (uint32_t lane = 0; lane < kLanes; lane++) mask |= uint32_t(f(std::get<n>(s)[lane]...)) << lane;
    write_mask(w, i.d, lanes, mask);
  } else {
    alignas(64) D values[kLanes];
    for (uint32_t lane = 0; lane < kLanes; lane++) values[lane] = D(f(std::get<n>(s)[lane]...));
    write(w, i.d, lanes, values);
  }
}
template <auto f, class D, class... S> void map(Warp &w, const Instruction &i, uint32_t lanes) {
  map_lanes<f, D, S...>(w, i, lanes, std::index_sequence_for<S...>{});
}

// An opcode whose operands are registers and immediates.
struct Opcode {
  Execute execute;
  uint8_t d, a[4]; // in bits; 1: a predicate, 0: no operand
};
using Opcodes = std::unordered_map<std::string, Opcode>;

template <class T> constexpr uint8_t kBits = sizeof(T) * 8;
template <> inline constexpr uint8_t kBits<bool> = 1;
template <auto f, class D, class... S> constexpr Opcode of() { return {map<f, D, S...>, kBits<D>, {kBits<S>...}}; }

void add_integer(Opcodes &);
void add_floating(Opcodes &);
void add_conversions(Opcodes &);

// In memory.cpp, shuffle.cpp, barrier.cpp. Each returns false if it does not know the opcode.
bool decode_memory(Kernel &, Instruction &, const std::string &opcode, const std::vector<Operand> &);
bool decode_warp(Kernel &, Instruction &, const std::string &opcode, const std::vector<Operand> &);
bool decode_barrier(Kernel &, Instruction &, const std::string &opcode, const std::vector<Operand> &);

std::vector<std::string> split(const std::string &, char at);
// The slot of an operand that is read: a register with this many bits, or an immediate.
uint32_t source(Kernel &, const Operand &, uint8_t bits);
uint32_t destination(const Operand &, uint8_t bits);
void set_address(Instruction &, const Operand &);
void need(bool, const char *what); // throws a Fault if false

} // namespace strobe::emulator
