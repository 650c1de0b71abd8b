// The oracle's numbers: a value, and its derivative in the direction of the call's tangents (forward-mode differentiation by dual numbers).
// A call without tangents has derivatives of 0. What does not depend on the tangents contributes 0, even where a derivative is infinite.
#pragma once
#include <algorithm>
#include <cmath>
#include <numbers>

namespace strobe::oracle {

struct Tangent {
  double value = 0, tangent = 0;
  Tangent(double value = 0, double tangent = 0) : value(value), tangent(tangent) {}
  Tangent &operator+=(Tangent x) { return value += x.value, tangent += x.tangent, *this; }
};

// A function of x, and of y, with its partial derivatives.
inline double along(Tangent x, double derivative) { return x.tangent == 0 ? 0 : x.tangent * derivative; }
inline Tangent of(double value, Tangent x, double by_x) { return {value, along(x, by_x)}; }
inline Tangent of(double value, Tangent x, double by_x, Tangent y, double by_y) { return {value, along(x, by_x) + along(y, by_y)}; }

inline Tangent operator-(Tangent x) { return {-x.value, -x.tangent}; }
inline Tangent operator+(Tangent x, Tangent y) { return {x.value + y.value, x.tangent + y.tangent}; }
inline Tangent operator-(Tangent x, Tangent y) { return {x.value - y.value, x.tangent - y.tangent}; }
inline Tangent operator*(Tangent x, Tangent y) { return of(x.value * y.value, x, y.value, y, x.value); }
inline Tangent operator/(Tangent x, Tangent y) {
  const double quotient = x.value / y.value;
  return of(quotient, x, 1 / y.value, y, -quotient / y.value);
}

inline Tangent abs(Tangent x) { return of(std::abs(x.value), x, x.value > 0 ? 1 : x.value < 0 ? -1 : 0); }
inline Tangent exp(Tangent x) { return of(std::exp(x.value), x, std::exp(x.value)); }
inline Tangent exp2(Tangent x) { return of(std::exp2(x.value), x, std::exp2(x.value) * std::numbers::ln2); }
inline Tangent expm1(Tangent x) { return of(std::expm1(x.value), x, std::exp(x.value)); }
inline Tangent log(Tangent x) { return of(std::log(x.value), x, 1 / x.value); }
inline Tangent log2(Tangent x) { return of(std::log2(x.value), x, 1 / (x.value * std::numbers::ln2)); }
inline Tangent log1p(Tangent x) { return of(std::log1p(x.value), x, 1 / (1 + x.value)); }
inline Tangent sqrt(Tangent x) { return of(std::sqrt(x.value), x, 0.5 / std::sqrt(x.value)); }
inline Tangent sin(Tangent x) { return of(std::sin(x.value), x, std::cos(x.value)); }
inline Tangent cos(Tangent x) { return of(std::cos(x.value), x, -std::sin(x.value)); }
inline Tangent tan(Tangent x) { return of(std::tan(x.value), x, 1 + std::tan(x.value) * std::tan(x.value)); }
inline Tangent asin(Tangent x) { return of(std::asin(x.value), x, 1 / std::sqrt((1 - x.value) * (1 + x.value))); }
inline Tangent acos(Tangent x) { return of(std::acos(x.value), x, -1 / std::sqrt((1 - x.value) * (1 + x.value))); }
inline Tangent atan(Tangent x) { return of(std::atan(x.value), x, 1 / (1 + x.value * x.value)); }
inline Tangent sinh(Tangent x) { return of(std::sinh(x.value), x, std::cosh(x.value)); }
inline Tangent cosh(Tangent x) { return of(std::cosh(x.value), x, std::sinh(x.value)); }
inline Tangent tanh(Tangent x) { return of(std::tanh(x.value), x, 1 - std::tanh(x.value) * std::tanh(x.value)); }
inline Tangent asinh(Tangent x) { return of(std::asinh(x.value), x, 1 / std::hypot(x.value, 1)); }
inline Tangent acosh(Tangent x) { return of(std::acosh(x.value), x, 1 / (std::sqrt(x.value - 1) * std::sqrt(x.value + 1))); }
inline Tangent atanh(Tangent x) { return of(std::atanh(x.value), x, 1 / ((1 - x.value) * (1 + x.value))); }
inline Tangent erf(Tangent x) { return of(std::erf(x.value), x, 2 * std::numbers::inv_sqrtpi * std::exp(-x.value * x.value)); }
inline Tangent erfc(Tangent x) { return of(std::erfc(x.value), x, -2 * std::numbers::inv_sqrtpi * std::exp(-x.value * x.value)); }
inline Tangent atan2(Tangent x, Tangent y) {
  const double square = x.value * x.value + y.value * y.value;
  return of(std::atan2(x.value, y.value), x, y.value / square, y, -x.value / square);
}
inline Tangent pow(Tangent x, Tangent y) {
  const double power = std::pow(x.value, y.value);
  const double by_x = y.value == 0 ? 0 : y.value * std::pow(x.value, y.value - 1);
  const double by_y = x.value == 0 && y.value >= 0 ? 0 : power * std::log(x.value);
  return of(power, x, by_x, y, by_y);
}

} // namespace strobe::oracle
