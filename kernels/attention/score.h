// From q.k to the score that softmax sees, and back: softcap, hyperbolic distance, ALiBi. V is a float on the GPU and a vector of lanes on
// the CPU; V's type selects tanh and abs.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

// c tanh(s / c) (Gemma 2), and its derivative by s. tanh(x, slope), which is defined with V, returns the derivative as well, because 1 -
// tanh^2 would cancel where tanh saturates.
template <class V> STROBE_FN V softcap(V s, V cap, V inverse_cap, V &slope) { return cap * tanh(s * inverse_cap, slope); }
// The score -beta arccosh(max(-x, 1)) - shift of a Lorentz product x (Gulcehre et al. 2019), and its derivative by x: beta / sqrt(x^2 - 1),
// or 0 for x >= -1. The caller gives distance and factor, whose product is beta arccosh(max(-x, 1)). slope: on entry the derivative of
// arccosh, on return that of the score.
template <class V> STROBE_FN V hyperbolic(V distance, V factor, V beta, V shift, V &slope) {
  slope *= beta;
  return -(factor * distance + shift);
}
// ALiBi's term of the score, -slope |i + offset - j| (Press et al. 2022). distance: i + offset - j.
template <class V> STROBE_FN V alibi(V slope, V distance) { return -slope * abs(distance); }

} // namespace strobe::inline STROBE_ISA
