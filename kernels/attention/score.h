// From q.k to the score that softmax sees, and back: softcap, hyperbolic distance, ALiBi. V is a float on the GPU, a vector of lanes on the
// CPU. tanh and abs are found with the type.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

// c tanh(s / c) (Gemma 2), and its derivative by s. tanh(x, slope) comes with the type: 1 - tanh^2 would cancel where it saturates.
template <class V> STROBE_FN V softcap(V s, V cap, V inverse_cap, V &slope) { return cap * tanh(s * inverse_cap, slope); }
// -beta arccosh(max(-x, 1)) - shift of a Lorentz product x (Gulcehre et al. 2019), and its derivative by x: beta / sqrt(x^2 - 1), and 0
// from x = -1 on. distance * factor: beta arccosh(max(-x, 1)); slope: the derivative of the arccosh, which becomes the score's.
template <class V> STROBE_FN V hyperbolic(V distance, V factor, V beta, V shift, V &slope) {
  slope *= beta;
  return -(factor * distance + shift);
}
// -slope |i + offset - j| (Press et al. 2022)
template <class V> STROBE_FN V alibi(V slope, V distance) { return -slope * abs(distance); }

} // namespace strobe::inline STROBE_ISA
