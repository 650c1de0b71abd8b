// From q.k to the score that softmax sees, and back: scale, softcap, ALiBi. V is a float on the GPU, a vector of lanes on the CPU.
// tanh and abs are found with the type.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

// c tanh(s / c) (Gemma 2)
template <class V> STROBE_FN V softcap(V s, V cap, V inverse_cap) { return cap * tanh(s * inverse_cap); }
// d capped / d s, from the capped value
template <class V> STROBE_FN V softcap_slope(V capped, V inverse_cap) {
  V t = capped * inverse_cap;
  return V(1) - t * t;
}
// -slope |i + offset - j| (Press et al. 2022)
template <class V> STROBE_FN V alibi(V slope, V distance) { return -slope * abs(distance); }

} // namespace strobe::inline STROBE_ISA
