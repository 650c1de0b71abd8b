// Integers, bits, predicates, moves and choices.
#include "opcodes.h"

namespace strobe::emulator {
namespace {

// Lanes hold unsigned numbers, so that sums and products wrap as on the GPU.
template <class T> void add_arithmetic(Opcodes &o, const std::string &type) {
  using U = std::make_unsigned_t<T>;
  o["add." + type] = of<[](U a, U b) { return U(a + b); }, U, U, U>();
  o["sub." + type] = of<[](U a, U b) { return U(a - b); }, U, U, U>();
  o["mul.lo." + type] = of<[](U a, U b) { return U(uint64_t(a) * b); }, U, U, U>();
  o["mad.lo." + type] = of<[](U a, U b, U c) { return U(uint64_t(a) * b + c); }, U, U, U, U>();
  o["neg." + type] = of<[](U a) { return U(0 - a); }, U, U>();
  o["abs." + type] = of<[](T a) { return a < 0 ? U(0 - U(a)) : U(a); }, U, T>();
  o["min." + type] = of<[](T a, T b) { return a < b ? a : b; }, T, T, T>();
  o["max." + type] = of<[](T a, T b) { return a < b ? b : a; }, T, T, T>();
  // The result of division by 0 is unspecified; by -1 it may overflow.
  o["div." + type] = of<[](T a, T b) { return b == 0 ? T(-1) : b == T(-1) && std::is_signed_v<T> ? T(U(0) - U(a)) : T(a / b); }, T, T, T>();
  o["rem." + type] = of<[](T a, T b) { return b == 0 ? a : b == T(-1) && std::is_signed_v<T> ? T(0) : T(a % b); }, T, T, T>();
  o["shr." + type] = of<[](T a, uint32_t n) { return n < sizeof(T) * 8 ? T(a >> n) : T(a < 0 ? -1 : 0); }, T, T, uint32_t>();
  if constexpr (sizeof(T) < 8) {
    using Wide = std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                    std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>;
    o["mul.wide." + type] = of<[](T a, T b) { return Wide(Wide(a) * Wide(b)); }, Wide, T, T>();
    o["mul.hi." + type] = of<[](T a, T b) { return T(Wide(a) * Wide(b) >> sizeof(T) * 8); }, T, T, T>();
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    o["mul.hi." + type] = of<[](T a, T b) { return T(Wide(a) * b >> 64); }, T, T, T>();
  }
}

template <class T> void add_comparisons(Opcodes &o, const std::string &type) {
  o["setp.eq." + type] = of<[](T a, T b) { return a == b; }, bool, T, T>();
  o["setp.ne." + type] = of<[](T a, T b) { return a != b; }, bool, T, T>();
  o["setp.lt." + type] = of<[](T a, T b) { return a < b; }, bool, T, T>();
  o["setp.le." + type] = of<[](T a, T b) { return a <= b; }, bool, T, T>();
  o["setp.gt." + type] = of<[](T a, T b) { return b < a; }, bool, T, T>();
  o["setp.ge." + type] = of<[](T a, T b) { return a >= b; }, bool, T, T>();
}

template <class T> void add_bits(Opcodes &o, const std::string &type) {
  o["and." + type] = of<[](T a, T b) { return T(a & b); }, T, T, T>();
  o["or." + type] = of<[](T a, T b) { return T(a | b); }, T, T, T>();
  o["xor." + type] = of<[](T a, T b) { return T(a ^ b); }, T, T, T>();
  o["not." + type] = of<[](T a) { return T(~a); }, T, T>();
  o["shl." + type] = of<[](T a, uint32_t n) { return n < sizeof(T) * 8 ? T(a << n) : T(0); }, T, T, uint32_t>();
}

template <class T> void add_moves(Opcodes &o, const std::string &width) {
  for (const char *kind : {"b", "u", "s", "f"}) {
    o["mov." + (kind + width)] = of<[](T a) { return a; }, T, T>();
    o["selp." + (kind + width)] = of<[](T a, T b, bool p) { return p ? a : b; }, T, T, T, bool>();
  }
}

// Predicates have one bit per lane, so one operation serves all lanes.
template <auto f> void masks(Warp &w, const Instruction &i, uint32_t lanes) {
  const auto mask = [&](uint32_t slot) { return slot == kNoSlot ? 0 : *w.lanes<uint32_t>(slot); };
  write_mask(w, i.d, lanes, f(mask(i.a[0]), mask(i.a[1])));
}

// Replaces the bits [at, at + length) of b by the lowest bits of a.
template <class T> T insert_bits(T a, T b, uint32_t at, uint32_t length) {
  at &= 255, length &= 255;
  if (at >= sizeof(T) * 8 || length == 0) return b;
  const T field = (length >= sizeof(T) * 8 ? ~T(0) : (T(1) << length) - 1) << at;
  return (b & ~field) | (a << at & field);
}

// Bit 4 a + 2 b + c of `table`, for the bits a, b and c at each place.
uint32_t table_of_bits(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t d = 0;
  for (int row = 0; row < 8; row++)
    if (table >> row & 1) d |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  return d;
}

// Each of the selector's four numbers selects a byte of b:a. If the number's highest bit is set, the sign of that byte is replicated
// instead.
uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t from = uint64_t(b) << 32 | a;
  uint32_t d = 0;
  for (int n = 0; n < 4; n++) {
    const uint32_t select = selector >> 4 * n;
    uint8_t byte = from >> 8 * (select & 7);
    if (select & 8) byte = byte & 0x80 ? 0xFF : 0;
    d |= uint32_t(byte) << 8 * n;
  }
  return d;
}

template <class D> void read_clock(Warp &w, const Instruction &i, uint32_t lanes) {
  D values[kLanes];
  for (D &value : values) value = D(w.block.grid.clock);
  write(w, i.d, lanes, values);
}

} // namespace

void add_integer(Opcodes &o) {
  add_arithmetic<int16_t>(o, "s16"), add_arithmetic<uint16_t>(o, "u16");
  add_arithmetic<int32_t>(o, "s32"), add_arithmetic<uint32_t>(o, "u32");
  add_arithmetic<int64_t>(o, "s64"), add_arithmetic<uint64_t>(o, "u64");
  add_comparisons<int16_t>(o, "s16"), add_comparisons<uint16_t>(o, "u16"), add_comparisons<uint16_t>(o, "b16");
  add_comparisons<int32_t>(o, "s32"), add_comparisons<uint32_t>(o, "u32"), add_comparisons<uint32_t>(o, "b32");
  add_comparisons<int64_t>(o, "s64"), add_comparisons<uint64_t>(o, "u64"), add_comparisons<uint64_t>(o, "b64");
  add_bits<uint16_t>(o, "b16"), add_bits<uint32_t>(o, "b32"), add_bits<uint64_t>(o, "b64");
  add_moves<uint16_t>(o, "16"), add_moves<uint32_t>(o, "32"), add_moves<uint64_t>(o, "64");

  o["and.pred"] = {masks<[](uint32_t a, uint32_t b) { return a & b; }>, 1, {1, 1}};
  o["or.pred"] = {masks<[](uint32_t a, uint32_t b) { return a | b; }>, 1, {1, 1}};
  o["xor.pred"] = {masks<[](uint32_t a, uint32_t b) { return a ^ b; }>, 1, {1, 1}};
  o["not.pred"] = {masks<[](uint32_t a, uint32_t) { return ~a; }>, 1, {1}};
  o["mov.pred"] = {masks<[](uint32_t a, uint32_t) { return a; }>, 1, {1}};

  o["bfi.b32"] = of<insert_bits<uint32_t>, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>();
  o["bfi.b64"] = of<insert_bits<uint64_t>, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t>();
  o["clz.b64"] = of<[](uint64_t a) { return a ? __builtin_clzll(a) : 64; }, uint32_t, uint64_t>();
  o["mad.wide.u32"] = of<[](uint32_t a, uint32_t b, uint64_t c) { return uint64_t(a) * b + c; }, uint64_t, uint32_t, uint32_t, uint64_t>();
  o["mad.wide.s32"] =
      of<[](int32_t a, int32_t b, int64_t c) { return uint64_t(int64_t(a) * b) + uint64_t(c); }, uint64_t, int32_t, int32_t, int64_t>();
  o["clz.b32"] = of<[](uint32_t a) { return a ? __builtin_clz(a) : 32; }, uint32_t, uint32_t>();
  o["popc.b32"] = of<[](uint32_t a) { return __builtin_popcount(a); }, uint32_t, uint32_t>();
  o["lop3.b32"] = of<table_of_bits, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>();
  o["prmt.b32"] = of<permute, uint32_t, uint32_t, uint32_t, uint32_t>();

  o["mov.u32%clock"] = {read_clock<uint32_t>, 32, {}};
  o["mov.u64%clock64"] = o["mov.u64%globaltimer"] = {read_clock<uint64_t>, 64, {}};
}

} // namespace strobe::emulator
