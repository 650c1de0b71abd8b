// Floating point. No operations are fused. Approximations are functions of the host, which are more exact than the GPU's.
#include "numbers.h"
#include "opcodes.h"

namespace strobe::emulator {
namespace {

// The greater number. If one operand is NaN, the result is the other one. -0 is below +0.
template <class T> T greater(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
template <class T> T lesser(T a, T b) { return -greater<T>(-a, -b); }

// a + b, rounded toward zero. The error of rounding to nearest is computed exactly (Knuth's sum).
template <class T> T sum_toward_zero(T a, T b) {
  const T sum = a + b, of_b = sum - a, lost = (a - (sum - of_b)) + (b - of_b);
  return lost != 0 && (lost < 0) == (sum > 0) ? std::nextafter(sum, T(0)) : sum;
}

template <class T> void add_type(Opcodes &o, const std::string &type) {
  for (const std::string rounding : {"", "rn."}) {
    o["add." + rounding + type] = of<[](T a, T b) { return a + b; }, T, T, T>();
    o["sub." + rounding + type] = of<[](T a, T b) { return a - b; }, T, T, T>();
    o["mul." + rounding + type] = of<[](T a, T b) { return a * b; }, T, T, T>();
  }
  o["add.rz." + type] = of<sum_toward_zero<T>, T, T, T>();
  o["fma.rn." + type] = of<[](T a, T b, T c) { return std::fma(a, b, c); }, T, T, T, T>();
  o["div.rn." + type] = of<[](T a, T b) { return a / b; }, T, T, T>();
  o["rcp.rn." + type] = of<[](T a) { return 1 / a; }, T, T>();
  o["sqrt.rn." + type] = of<[](T a) { return std::sqrt(a); }, T, T>();
  o["neg." + type] = of<[](T a) { return -a; }, T, T>();
  o["abs." + type] = of<[](T a) { return std::fabs(a); }, T, T>();
  o["copysign." + type] = of<[](T sign, T a) { return std::copysign(a, sign); }, T, T, T>();
  o["min." + type] = of<lesser<T>, T, T, T>();
  o["max." + type] = of<greater<T>, T, T, T>();

  // Ordered comparisons, ne too, are false if an operand is NaN. Comparisons whose names end with u are then true.
  o["setp.eq." + type] = of<[](T a, T b) { return a == b; }, bool, T, T>();
  o["setp.ne." + type] = of<[](T a, T b) { return a < b || b < a; }, bool, T, T>();
  o["setp.lt." + type] = of<[](T a, T b) { return a < b; }, bool, T, T>();
  o["setp.le." + type] = of<[](T a, T b) { return a <= b; }, bool, T, T>();
  o["setp.gt." + type] = of<[](T a, T b) { return b < a; }, bool, T, T>();
  o["setp.ge." + type] = of<[](T a, T b) { return a >= b; }, bool, T, T>();
  o["setp.equ." + type] = of<[](T a, T b) { return !(a < b || b < a); }, bool, T, T>();
  o["setp.neu." + type] = of<[](T a, T b) { return a != b; }, bool, T, T>();
  o["setp.ltu." + type] = of<[](T a, T b) { return !(a >= b); }, bool, T, T>();
  o["setp.leu." + type] = of<[](T a, T b) { return !(b < a); }, bool, T, T>();
  o["setp.gtu." + type] = of<[](T a, T b) { return !(a <= b); }, bool, T, T>();
  o["setp.geu." + type] = of<[](T a, T b) { return !(a < b); }, bool, T, T>();
  o["setp.num." + type] = of<[](T a, T b) { return a == a && b == b; }, bool, T, T>();
  o["setp.nan." + type] = of<[](T a, T b) { return a != a || b != b; }, bool, T, T>();
}

// a b + c of FP32, rounded down, or toward zero.
float fma_directed(float a, float b, float c, bool down) {
  const double product = double(a) * b, sum = product + c, part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  const float nearest = float(sum);
  if (!std::isfinite(nearest)) return nearest;
  const bool above = nearest > sum || (nearest == sum && error < 0), below = nearest < sum || (nearest == sum && error > 0);
  if (down || sum > 0) return above ? std::nextafter(nearest, -INFINITY) : nearest;
  return below ? std::nextafter(nearest, INFINITY) : nearest;
}

// Applies f to both halves.
template <auto f> uint32_t halves(uint32_t a, uint32_t b, uint32_t c) {
  return uint32_t(f(a >> 16, b >> 16, c >> 16)) << 16 | f(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF);
}
template <auto from, auto to> uint16_t fma_half(uint16_t a, uint16_t b, uint16_t c) { return to(fma_to_odd(from(a), from(b), from(c))); }
// Sets all bits of the halves for which the comparison is true.
template <auto from, auto holds> uint32_t set_halves(uint32_t a, uint32_t b) {
  return (holds(from(a >> 16), from(b >> 16)) ? 0xFFFF0000 : 0) | (holds(from(a & 0xFFFF), from(b & 0xFFFF)) ? 0xFFFF : 0);
}
bool differ(float a, float b) { return a != b; }
bool is_less(float a, float b) { return a < b; }
template <auto to> uint32_t pack(float high, float low) { return uint32_t(to(high)) << 16 | to(low); }

} // namespace

void add_floating(Opcodes &o) {
  add_type<float>(o, "f32"), add_type<double>(o, "f64");
  o["max.NaN.f32"] = of<[](float a, float b) { return a != a || b != b ? number(0x7FFFFFFF) : greater(a, b); }, float, float, float>();
  o["min.NaN.f32"] = of<[](float a, float b) { return a != a || b != b ? number(0x7FFFFFFF) : lesser(a, b); }, float, float, float>();
  o["fma.rm.f32"] = of<[](float a, float b, float c) { return fma_directed(a, b, c, true); }, float, float, float, float>();
  o["fma.rz.f32"] = of<[](float a, float b, float c) { return fma_directed(a, b, c, false); }, float, float, float, float>();
  o["cvt.sat.f32.f32"] = of<[](float a) { return std::fmin(std::fmax(a, 0.0f), 1.0f); }, float, float>();
  o["div.full.f32"] = o["div.approx.ftz.f32"] = of<[](float a, float b) { return a / b; }, float, float, float>();
  o["rsqrt.approx.f32"] = o["rsqrt.approx.ftz.f32"] = of<[](float a) { return 1 / std::sqrt(a); }, float, float>();
  o["rsqrt.approx.ftz.f64"] = of<[](double a) { return 1 / std::sqrt(a); }, double, double>();
  o["sqrt.approx.f32"] = of<[](float a) { return std::sqrt(a); }, float, float>();
  o["ex2.approx.f32"] = of<[](float a) { return std::exp2(a); }, float, float>();
  o["div.approx.f32"] = of<[](float a, float b) { return a / b; }, float, float, float>();
  o["rcp.approx.ftz.f32"] = of<[](float a) { return flush(1 / flush(a)); }, float, float>();
  o["rcp.approx.ftz.f64"] = of<[](double a) { return 1 / a; }, double, double>();
  o["sqrt.approx.ftz.f32"] = of<[](float a) { return std::sqrt(flush(a)); }, float, float>();
  o["ex2.approx.ftz.f32"] = of<[](float a) { return flush(std::exp2(flush(a))); }, float, float>();
  o["lg2.approx.f32"] = of<[](float a) { return std::log2(a); }, float, float>();
  o["lg2.approx.ftz.f32"] = of<[](float a) { return std::log2(flush(a)); }, float, float>();
  o["tanh.approx.f32"] = of<[](float a) { return std::tanh(a); }, float, float>();

  o["fma.rn.f16x2"] = of<halves<fma_half<from_half, to_half>>, uint32_t, uint32_t, uint32_t, uint32_t>();
  o["fma.rn.bf16x2"] = of<halves<fma_half<from_bfloat, to_bfloat>>, uint32_t, uint32_t, uint32_t, uint32_t>();
  o["set.neu.u32.f16x2"] = of<set_halves<from_half, differ>, uint32_t, uint32_t, uint32_t>();
  o["set.lt.u32.f16x2"] = of<set_halves<from_half, is_less>, uint32_t, uint32_t, uint32_t>();
  o["set.neu.u32.bf16x2"] = of<set_halves<from_bfloat, differ>, uint32_t, uint32_t, uint32_t>();

  o["cvt.f32.f16"] = of<from_half, float, uint16_t>();
  o["cvt.f32.bf16"] = of<from_bfloat, float, uint16_t>();
  o["cvt.rn.f16.f32"] = of<to_half, uint16_t, float>();
  o["cvt.rn.bf16.f32"] = of<to_bfloat, uint16_t, float>();
  o["cvt.rn.f16x2.f32"] = of<pack<to_half>, uint32_t, float, float>();
  o["cvt.rn.bf16x2.f32"] = of<pack<to_bfloat>, uint32_t, float, float>();
  o["cvt.rna.tf32.f32"] = of<[](float a) { return bits(to_tf32(a)); }, uint32_t, float>();
}

} // namespace strobe::emulator
