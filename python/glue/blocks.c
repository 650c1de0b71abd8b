#include "glue.h"

void strobe_glue_blocks_of_mask(const uint8_t *mask, int64_t matrices, int64_t seqlen_q, int64_t seqlen_k, int64_t block_q, int64_t block_k,
                                uint8_t *kept) {
  const int64_t rows = (seqlen_q + block_q - 1) / block_q, cols = (seqlen_k + block_k - 1) / block_k;
  for (int64_t m = 0; m < matrices; m++)
    for (int64_t i = 0; i < seqlen_q; i++, mask += seqlen_k) {
      uint8_t *row = kept + (m * rows + i / block_q) * cols;
      for (int64_t j = 0; j < seqlen_k; j++) row[j / block_k] |= mask[j] != 0;
    }
}

int64_t strobe_glue_count_kept(const uint8_t *kept, int64_t matrices, int64_t rows, int64_t cols, int32_t *offsets) {
  int64_t n = 0;
  for (int64_t m = 0; m < matrices; m++) {
    *offsets++ = (int32_t)n;
    for (int64_t i = 0; i < rows; i++) {
      for (int64_t j = 0; j < cols; j++) n += *kept++ != 0;
      *offsets++ = (int32_t)n;
    }
  }
  return n;
}

void strobe_glue_indices_of_kept(const uint8_t *kept, int64_t matrices, int64_t rows, int64_t cols, int64_t count, int32_t *indices) {
  for (int64_t i = 0; i < matrices * rows; i++)
    for (int64_t j = 0; j < cols; j++)
      if (*kept++ && count-- > 0) *indices++ = (int32_t)j;
}

static int is_csr(int64_t matrices, int64_t rows, int64_t cols, int64_t kept, const int32_t *offsets, const int32_t *indices) {
  int64_t end = 0;
  for (int64_t m = 0; m < matrices; m++, offsets += rows + 1) {
    if (offsets[0] != end) return 0;
    for (int64_t i = 0; i < rows; i++) {
      end = offsets[i + 1];
      if (end < offsets[i] || end > kept) return 0;
      for (int64_t e = offsets[i], least = 0; e < end; least = indices[e++] + 1)
        if (indices[e] < least || indices[e] >= cols) return 0;
    }
  }
  return end == kept;
}

/* Counting sort by column: counts, their running sum, then each entry goes to its place. Another thread may change the caller's CSR after a
 * check, so every index that is written through is checked against its bounds once more. */
int32_t strobe_glue_transpose(int64_t matrices, int64_t rows, int64_t cols, int64_t kept, const int32_t *offsets, const int32_t *indices,
                              int32_t *offsets_t, int32_t *indices_t) {
  if (!is_csr(matrices, rows, cols, kept, offsets, indices)) return 0;
  for (int64_t m = 0; m < matrices; m++, offsets += rows + 1, offsets_t += cols + 1) {
    /* Offsets are shifted by one. While entries are placed, offsets_t[j + 1] is the place of column j's next entry; at the end it is the
     * start of column j + 1. */
    int32_t running = offsets[0];
    offsets_t[0] = running;
    for (int64_t j = 0; j < cols; j++) offsets_t[j + 1] = 0;
    const int64_t begin = running, end = offsets[rows];
    if (begin < 0 || end > kept) return 0;
    for (int64_t e = begin; e < end; e++) {
      const int64_t j = indices[e];
      if (j < 0 || j >= cols) return 0;
      offsets_t[j + 1]++;
    }
    for (int64_t j = 0; j < cols; j++) {
      int32_t count = offsets_t[j + 1];
      offsets_t[j + 1] = running;
      running += count;
    }
    for (int64_t i = 0; i < rows; i++)
      for (int64_t e = begin > offsets[i] ? begin : offsets[i]; e < end && e < offsets[i + 1]; e++) {
        const int64_t j = indices[e];
        if (j < 0 || j >= cols || offsets_t[j + 1] >= kept) return 0;
        indices_t[offsets_t[j + 1]++] = (int32_t)i;
      }
  }
  return 1;
}
