// What must hold of the integers in host memory: cu_seqlens and the block-sparse CSR. Each check answers with the first thing wrong, or
// with an empty text.
#pragma once
#include <cstdint>
#include <string>

namespace strobe {

std::string check_cu_seqlens(const int32_t *cu, int64_t batch, int64_t total, int64_t max_seqlen);

// A stack of `matrices` CSR matrices: offsets (matrices, rows + 1), absolute, into indices[kept] in [0, cols), ascending within a row.
struct Csr {
  int64_t matrices, rows, cols, kept;
  const int32_t *offsets, *indices;
};
std::string check_offsets(const Csr &);
std::string check_indices(const Csr &); // only after check_offsets found nothing
// Whether `t` holds the transposes of `m`; both checked before. O(kept + cols).
std::string check_transpose(const Csr &m, const Csr &t);

} // namespace strobe
