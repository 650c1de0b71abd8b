// Where a tensor's elements lie, and whether two tensors may share a byte.
#pragma once
#include <cstdint>
#include <optional>

#include "strobe/strobe.h"

namespace strobe {

// The bytes begin + sum(i_a * stride_a) + [0, element), 0 <= i_a < count_a, where a is an axis of several elements; its stride is positive.
struct Footprint {
  struct Axis {
    int64_t stride, count;
  };
  int64_t begin = 0, end = 0; // a range that contains all bytes; empty if the tensor is empty
  int64_t element = 0;
  int32_t axes = 0;
  Axis axis[4]; // strides ascending
};

// A tensor's footprint. Null if its number of elements, or a distance between elements, exceeds 64 bits.
std::optional<Footprint> footprint(const strobe_tensor &, int64_t element_bytes);

// True only if no two elements share a byte. (The condition is sufficient: each stride exceeds the reach of all smaller strides.)
bool each_element_apart(const Footprint &);

// Whether the elements follow one another in row-major order without gaps.
bool is_dense(const strobe_tensor &);
// Copies the elements to `to`, in row-major order and without gaps.
void gather(const strobe_tensor &, int64_t element_bytes, void *to);

// Whether the tensors have no byte in common. True is always right. It is returned if their ranges are disjoint; if both repeat with a
// common period within which they stay apart (like q, k and v cut out of one packed tensor, or numbers and their scales); or if a search
// finds no common byte. False may be wrong, if strides are so irregular that the search would take more than some thousand steps.
bool disjoint(const Footprint &, const Footprint &);

} // namespace strobe
