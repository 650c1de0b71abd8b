/* The C functions that the Python package needs beside the library. */
#ifndef STROBE_GLUE_H
#define STROBE_GLUE_H

#include <stdint.h>

#include "strobe/strobe.h"

/* Fills *t. swap_1_2: exchanges axes 1 and 2, so that a (B,S,H,D) tensor becomes the library's (B,H,S,D). */
void strobe_glue_tensor(strobe_tensor *t, uintptr_t data, int32_t dtype, int32_t device_type, int32_t device_index, int32_t rank,
                        const int64_t *shape, const int64_t *strides, int32_t swap_1_2);

/* Looks for the OpenMP runtime that this process has loaded. If there is none, the library starts threads for each call. */
void strobe_glue_find_openmp(void);

/* Fills *e so that CPU work runs on `threads` threads. They are those of the OpenMP runtime's team, if it is as large and can be started;
 * otherwise the library starts threads, as many of them as the system allows. */
void strobe_glue_execution(strobe_execution *e, int32_t threads);

/* strobe_run with the address addresses[i] for field fields[i] of strobe_addresses (0: q). threads: 0 on a GPU. */
int32_t strobe_glue_run(const strobe_prepared *prepared, int32_t count, const uint8_t *fields, const uintptr_t *addresses, int32_t threads,
                        uintptr_t stream, uintptr_t workspace, uint64_t workspace_bytes);

/* strobe_prepare with the tensor tensors[i] for field fields[i] of strobe_tensors (0: q). Writes the size of its workspace as well.
 * threads: 0 on a GPU. */
int32_t strobe_glue_prepare(const strobe_attention *attention, int32_t count, const uint8_t *fields, const strobe_tensor *tensors,
                            int32_t direction, int32_t threads, int32_t reserved_sms, strobe_prepared **prepared,
                            uint64_t *workspace_bytes);

/* Block masks: from elements to blocks, and from blocks to CSR. A mask is a stack of `matrices` matrices of rows x cols blocks; `offsets`
 * is (matrices, rows + 1). */

/* kept[m, i / block_q, j / block_k] |= mask[m, i, j]; kept (matrices, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)) begins as zeros.
 * */
void strobe_glue_blocks_of_mask(const uint8_t *mask, int64_t matrices, int64_t seqlen_q, int64_t seqlen_k, int64_t block_q, int64_t block_k,
                                uint8_t *kept);
/* Writes the CSR offsets of kept; returns how many blocks are kept. */
int64_t strobe_glue_count_kept(const uint8_t *kept, int64_t matrices, int64_t rows, int64_t cols, int32_t *offsets);
/* Writes the CSR columns of kept, at most `count` of them. */
void strobe_glue_indices_of_kept(const uint8_t *kept, int64_t matrices, int64_t rows, int64_t cols, int64_t count, int32_t *indices);
/* Writes the transposes: offsets_t (matrices, cols + 1), indices_t (kept). Returns 0, without usable output, unless the matrices follow one
 * another in absolute offsets from 0 to kept, and the indices of each row lie in [0, cols) and ascend strictly. marks (kept): numbers of
 * the entries, which go with them to marks_t; null: there are none. */
int32_t strobe_glue_transpose(int64_t matrices, int64_t rows, int64_t cols, int64_t kept, const int32_t *offsets, const int32_t *indices,
                              int32_t *offsets_t, int32_t *indices_t, const int32_t *marks, int32_t *marks_t);

/* The handler of XLA's typed FFI for a strobe_direction and a strobe_device_type: the address of an XLA_FFI_Handler. */
uintptr_t strobe_glue_xla_handler(int32_t direction, int32_t device_type);

#endif
