// Conversions between integers, and from integers and doubles to floating point. A register may be wider than the number that is read from
// it.
#include <cmath>
#include <limits>

#include "numbers.h"
#include "opcodes.h"

namespace strobe::emulator {
namespace {

template <class T> const char *kName = "";
template <> const char *kName<int8_t> = "s8";
template <> const char *kName<uint8_t> = "u8";
template <> const char *kName<int16_t> = "s16";
template <> const char *kName<uint16_t> = "u16";
template <> const char *kName<int32_t> = "s32";
template <> const char *kName<uint32_t> = "u32";
template <> const char *kName<int64_t> = "s64";
template <> const char *kName<uint64_t> = "u64";

// A register is read and written with at least 16 bits.
template <class T> using Register = std::conditional_t<sizeof(T) == 1, std::conditional_t<std::is_signed_v<T>, int16_t, uint16_t>, T>;

template <class D, class S> void add_pair(Opcodes &o) {
  const std::string name = std::string("cvt.") + kName<D> + "." + kName<S>;
  o[name] = of<[](Register<S> a) { return Register<D>(D(S(a))); }, Register<D>, Register<S>>();
  if constexpr (sizeof(S) < 8) o[name + "@64"] = of<[](uint64_t a) { return Register<D>(D(S(a))); }, Register<D>, uint64_t>();
  if constexpr (sizeof(S) < 4) o[name + "@32"] = of<[](uint32_t a) { return Register<D>(D(S(a))); }, Register<D>, uint32_t>();
}
template <class D, class... S> void add_row(Opcodes &o) { (add_pair<D, S>(o), ...); }
template <class... T> void add_all(Opcodes &o) { (add_row<T, T...>(o), ...); }

template <class T> void add_floats(Opcodes &o) {
  o[std::string("cvt.rn.f32.") + kName<T>] = of<[](T a) { return float(a); }, float, T>();
  o[std::string("cvt.rn.f64.") + kName<T>] = of<[](T a) { return double(a); }, double, T>();
}

// Clamps to the range of the integer; NaN becomes 0.
template <class D, class S> D to_integer(S x) {
  constexpr S kEnd = S(std::numeric_limits<D>::max() / 2 + 1) * 2;
  if (x != x) return 0;
  return x < -kEnd ? std::numeric_limits<D>::min() : x >= kEnd ? std::numeric_limits<D>::max() : D(x);
}
template <float (*kRound)(float), double (*kRoundWide)(double)> void add_rounding(Opcodes &o, const std::string &how) {
  o["cvt." + how + ".f32.f32"] = of<[](float a) { return kRound(a); }, float, float>();
  o["cvt." + how + ".s32.f32"] = of<[](float a) { return to_integer<int32_t>(kRound(a)); }, int32_t, float>();
  o["cvt." + how + ".s64.f32"] = of<[](float a) { return to_integer<int64_t>(kRound(a)); }, int64_t, float>();
  o["cvt." + how + ".f64.f64"] = of<[](double a) { return kRoundWide(a); }, double, double>();
  o["cvt." + how + ".s32.f64"] = of<[](double a) { return to_integer<int32_t>(kRoundWide(a)); }, int32_t, double>();
  o["cvt." + how + ".s64.f64"] = of<[](double a) { return to_integer<int64_t>(kRoundWide(a)); }, int64_t, double>();
}

uint32_t halves_of_e4m3(uint16_t x) { return uint32_t(half_of_e4m3(uint8_t(x >> 8))) << 16 | half_of_e4m3(uint8_t(x)); }

} // namespace

void add_conversions(Opcodes &o) {
  add_all<int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(o);
  add_floats<int32_t>(o), add_floats<uint32_t>(o), add_floats<int64_t>(o), add_floats<uint64_t>(o);
  add_rounding<std::rint, std::rint>(o, "rni"), add_rounding<std::trunc, std::trunc>(o, "rzi");
  add_rounding<std::floor, std::floor>(o, "rmi"), add_rounding<std::ceil, std::ceil>(o, "rpi");
  o["cvt.rn.f16x2.e4m3x2"] = of<halves_of_e4m3, uint32_t, uint16_t>();
  o["cvt.rn.satfinite.e4m3x2.f32"] = of<[](float a, float b) { return uint16_t(to_e4m3(a) << 8 | to_e4m3(b)); }, uint16_t, float, float>();
  o["cvt.rn.f32.f64"] = of<[](double a) { return float(a); }, float, double>();
  o["cvt.f64.f32"] = of<[](float a) { return double(a); }, double, float>();
}

} // namespace strobe::emulator
