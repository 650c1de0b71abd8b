#include "cuda/program/program.h"

namespace strobe::cuda {

void Launch::bind(const Addresses &addresses, std::byte *out) const {
  std::memcpy(out, arguments.data(), arguments.size());
  for (const uint16_t offset : marks) {
    void *address;
    std::memcpy(&address, out + offset, sizeof address);
    address = addresses.of(address);
    std::memcpy(out + offset, &address, sizeof address);
  }
  for (const uint16_t offset : map_requests) encode(*reinterpret_cast<TensorMap *>(out + offset), addresses);
}

} // namespace strobe::cuda
