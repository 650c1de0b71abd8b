// Structs of the C ABI begin with their size. Fields that an older caller lacks are zero; fields that only a newer caller knows must be
// zero.
#pragma once
#include <algorithm>
#include <cstring>

#include "attention/reasons.h"

namespace strobe {

// type: the struct is strobe_<type>; null: it has the argument's name.
template <class T> bool size_is_sane(const char *name, uint64_t size, Reasons &reasons, const char *type = nullptr) {
  constexpr uint64_t most = 4096; // no future version will be larger
  if (size >= sizeof(size) && size <= most && size % 8 == 0) return true;
  reasons.add(name, Code::version, "size is {0}; accepted is sizeof(strobe_{1}), here {2}", size, type ? type : name, sizeof(T));
  return false;
}

template <class T> T read_versioned(const char *name, const T *from, Reasons &reasons, const char *type = nullptr) {
  T known{};
  if (!from) {
    reasons.add(name, Code::missing, "missing; accepted is a pointer to a strobe_{0}", type ? type : name);
  } else if (size_is_sane<T>(name, from->size, reasons, type)) {
    std::memcpy(&known, from, std::min<size_t>(from->size, sizeof(T)));
    auto bytes = reinterpret_cast<const unsigned char *>(from);
    for (size_t i = sizeof(T); i < from->size; i++)
      if (bytes[i]) {
        reasons.add(name, Code::version, "a field at byte {0}, newer than this library ({1}), is set; accepted is zero", i,
                    strobe_version());
        break;
      }
  }
  known.size = sizeof(T);
  return known;
}

} // namespace strobe
