// Structs of the C ABI begin with their size: fields that an older caller lacks are zero; fields that a newer caller adds must be zero.
#pragma once
#include <algorithm>
#include <cstring>

#include "attention/reasons.h"

namespace strobe {

template <class T> bool size_is_sane(const char *name, uint64_t size, Reasons &reasons) {
  constexpr uint64_t most = 4096; // no future version is that large
  if (size >= sizeof(size) && size <= most && size % 8 == 0) return true;
  reasons.add(name, "size is ", size, "; accepted is sizeof(strobe_", name, "), here ", sizeof(T));
  return false;
}

template <class T> T read_versioned(const char *name, const T *from, Reasons &reasons) {
  T known{};
  if (!from) {
    reasons.add(name, "missing; accepted is a pointer to a strobe_", name);
  } else if (size_is_sane<T>(name, from->size, reasons)) {
    std::memcpy(&known, from, std::min<size_t>(from->size, sizeof(T)));
    auto bytes = reinterpret_cast<const unsigned char *>(from);
    for (size_t i = sizeof(T); i < from->size; i++)
      if (bytes[i]) {
        reasons.add(name, "a field at byte ", i, ", newer than this library (", strobe_version(), "), is set; accepted is zero");
        break;
      }
  }
  known.size = sizeof(T);
  return known;
}

} // namespace strobe
