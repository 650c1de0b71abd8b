/* Strobe: exact softmax attention, forward and backward. The C ABI.
 *
 * Conventions
 *   - Every struct begins with `size`; set it to sizeof the struct. A library newer than its caller then reads only what the caller has.
 *   - Zero is the default of every field. Where zero has a meaning of its own, a `has_*` flag says that the field is given.
 *   - Functions return a strobe_status. strobe_last_error() holds the text of this thread's last failure, strobe_last_refusal() the same
 *     as data.
 *   - Nothing is launched or written unless the whole call is valid. Nothing is printed. No exception leaves the library.
 *   - A null pointer stands for an absent tensor. The library never keeps a pointer after it returns.
 *   - A new field comes at the end of its struct, and gets a row in strobe/fields.inc.
 *
 * Shapes (B batch, H query heads, Hkv key heads (H a multiple of Hkv), Sq queries, Sk keys, D = Dqk head dimension, Dv value dimension)
 *   dense    q (B,H,Sq,D)   k (B,Hkv,Sk,D)   v (B,Hkv,Sk,Dv)   out, dout (B,H,Sq,Dv)   lse, dlse (B,H,Sq)
 *   varlen   q (Tq,H,D)     k (Tk,Hkv,D)     v (Tk,Hkv,Dv)     out, dout (Tq,H,Dv)     lse, dlse (H,Tq)     with both cu_seqlens (B+1)
 *   paged    k (pages,Hkv,page,D)   v (pages,Hkv,page,Dv)   with page_table (B,pages of a sequence); all else dense, or with cu_seqlens_q
 *   quantised  k, v as INT8, FP8 or INT4 with k_scale and v_scale; INT4 is uint8 (..,D/2), two numbers a byte, the low nibble first
 *   dq, dk, dv have the shapes of q, k, v. Strides are counted in elements and are arbitrary; those of inputs, lists of integers included,
 *   may be 0 or negative. Lengths and page tables are int32; in host memory int64 is accepted, too. Each call copies the lists in host
 *   memory. A list in device memory with gaps between its integers costs another launch, which copies it into the workspace; a page_table
 *   with gaps between its rows only does not.
 *   docs/semantics.md has the formulas.
 */
#ifndef STROBE_H
#define STROBE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define STROBE_API __declspec(dllexport)
#else
#define STROBE_API __attribute__((visibility("default")))
#endif

#define STROBE_VERSION_MAJOR 0
#define STROBE_VERSION_MINOR 2
#define STROBE_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

typedef enum strobe_status {
  STROBE_OK = 0,
  STROBE_INVALID_ARGUMENT = 1, /* the text names the argument, what was wrong and what is accepted */
  STROBE_UNSUPPORTED = 2,      /* the call is valid, but no engine here accepts it; the text has every engine's reason */
  STROBE_OUT_OF_MEMORY = 3,
  STROBE_DEVICE_ERROR = 4, /* a driver or compiler call failed */
  STROBE_INTERNAL = 5      /* a bug in Strobe */
} strobe_status;

typedef enum strobe_dtype {
  STROBE_FLOAT32 = 1,
  STROBE_FLOAT16 = 2,
  STROBE_BFLOAT16 = 3,
  STROBE_FLOAT64 = 4,
  STROBE_BOOL = 5, /* one byte: 0 is false, any other value is true */
  STROBE_INT32 = 6,
  STROBE_INT64 = 7,
  STROBE_INT8 = 8,        /* k and v only, with k_scale and v_scale; the same holds for the next three */
  STROBE_FLOAT8_E4M3 = 9, /* 1 sign bit, 4 exponent bits (bias 7), 3 fraction bits; NaN is 0x7F or 0xFF; no infinity */
  STROBE_UINT8 = 10,      /* two INT4 (-8 to 7, two's complement) per byte: column 2n is the low nibble of byte n */
  STROBE_FLOAT8_E5M2 = 11 /* 1 sign bit, 5 exponent bits (bias 15), 2 fraction bits: the upper byte of a float16, with its NaN, infinity */
} strobe_dtype;

typedef enum strobe_device_type { STROBE_CPU = 0, STROBE_CUDA = 1 } strobe_device_type;

typedef enum strobe_alignment {
  STROBE_BOTTOM_RIGHT = 0, /* the last query sees the last key: offset = Sk - Sq */
  STROBE_TOP_LEFT = 1      /* the first query sees the first key: offset = 0 */
} strobe_alignment;

/* How x = scale * q.k is transformed before a bias or ALiBi is added. */
typedef enum strobe_score {
  STROBE_DOT = 0,       /* x itself, or c * tanh(x / c) with softcap c */
  STROBE_HYPERBOLIC = 1 /* -beta * arccosh(max(-x, 1)) - shift, where x is a Lorentz product: see docs/hyperbolic.md */
} strobe_score;

/* A function of the caller's: a graph of operations, whose nodes take earlier nodes. operations.inc has the operations. */
typedef enum strobe_operation {
#define STROBE_OPERATION(name, number, inputs, takes, gives) STROBE_OP_##name = number,
#include "operations.inc"
} strobe_operation;

/* The most captured tensors of a call, and the most nodes of a function. */
enum { STROBE_MOST_CAPTURED = 8, STROBE_MOST_NODES = 1024 };

typedef struct strobe_node {
  int32_t operation; /* a strobe_operation */
  int32_t captured;  /* STROBE_OP_LOAD: n, for captured_n of strobe_tensors; else 0 */
  int32_t inputs[4]; /* the indices of earlier nodes; of those that the operation does not take: 0 */
  double real;       /* STROBE_OP_REAL: any number; else 0 */
  int64_t integer;   /* STROBE_OP_INTEGER, STROBE_OP_BOOLEAN; else 0 */
} strobe_node;

typedef struct strobe_function {
  uint64_t size;
  const strobe_node *nodes; /* the last one is the result */
  int64_t n_nodes;          /* 1 to STROBE_MOST_NODES */
} strobe_function;

/* The upper limits of strobe_execution.threads, and of strobe_attention.tile_q and tile_k. */
enum { STROBE_MAX_THREADS = 1024, STROBE_MAX_TILE = 65536 };

/* What a call computes. */
typedef enum strobe_direction {
  STROBE_FORWARD = 0,
  STROBE_BACKWARD = 1,
  STROBE_JVP = 2,         /* the derivatives of out and lse in the direction of the tangents */
  STROBE_BACKWARD_JVP = 3 /* the derivatives of the gradients in that direction */
} strobe_direction;

/* A view of memory that the caller owns. rank <= 4. Entries of shape and strides past rank are ignored. Strides count elements. */
typedef struct strobe_tensor {
  void *data; /* may be null if the tensor has no elements */
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t rank;
  int64_t shape[4];
  int64_t strides[4];
} strobe_tensor;

/* The tensors hold some rows, heads and sequences of a larger problem. Every option refers to the positions, heads and batch of that
 * problem: see "Parts of a problem" in docs/semantics.md. The lists lie in host memory; the call copies them. */
typedef struct strobe_part {
  uint64_t size;
  /* int64 (B|1, n, 2): ranges (start, length) of the rows of a sequence, ascending and disjoint; n is arbitrary */
  const strobe_tensor *q_ranges, *k_ranges;
  const strobe_tensor *seqlens_q, *seqlens_k; /* int64 (B|1): the lengths of the whole sequences */
  int64_t first_head;                         /* the index of the first query head in the whole problem */
  int64_t heads;                              /* the number of query heads in the whole problem; 0: first_head + H */
  int64_t first_batch;                        /* the index of the first sequence in the whole problem */
  /* 1: the queries also see keys that this call does not have. out is then float32 (float64 if q is), and lse, (2,B,H,Sq) or (2,H,Tq),
   * holds two numbers for each row, whose sum is the LSE. The backward takes lse and delta of the whole row; dq, dk and dv are float32.
   * Sinks are not accepted. */
  int32_t partial;
  int32_t reserved; /* 0 */
} strobe_part;

/* WHAT is computed: everything except the tensors. */
typedef struct strobe_attention {
  uint64_t size;
  /* The factor of q.k; without has_scale it is 1/sqrt(D), or 1 with STROBE_HYPERBOLIC. scale, softcap, beta and shift are accepted up to
     2e38, and without a limit for STROBE_FLOAT64 and the engine "reference". */
  double scale;
  int32_t has_scale;
  int32_t causal;          /* key j is visible to query i if j <= i + offset */
  int32_t alignment;       /* a strobe_alignment: it sets the offset that causal, window and ALiBi share */
  int32_t has_window_left; /* j >= i + offset - window_left */
  int64_t window_left;     /* >= 0 */
  int64_t window_right;    /* >= 0; j <= i + offset + window_right */
  int32_t has_window_right;
  int32_t deterministic;    /* gradients have the same bits in every run; on the CPU they always have */
  double softcap;           /* c * tanh(x / c); 0: no softcap */
  double dropout;           /* probability of dropping, in [0, 1), in steps of 1/256: see docs/semantics.md */
  uint64_t seed, offset;    /* they determine the dropout mask, unless strobe_tensors.rng is given */
  int64_t block_q, block_k; /* the blocks of the block-sparse mask, multiples of 16 */
  int64_t tile_q, tile_k;   /* the requested tile (Br, Bc); 0: the engine's own choice. strobe_explain names the tile that runs */
  /* Varlen only: upper bounds of the lengths, which are also the sizes of mask, bias and blocks. 0: these sizes are Tq and Tk. The host
   * then reads the longest lengths from a cu_seqlens in host memory; for one on a GPU, it launches as much work as the bounds say. */
  int64_t max_seqlen_q, max_seqlen_k;
  int32_t exact_max;  /* follow the running maximum even where an engine would let it lag, and compute the exact tanh of softcap */
  int32_t allow_tf32; /* let a GPU compute each fp32 product as a single TF32 product */
  int32_t strict;     /* refuse a call that would not run on the fastest engine of this device */
  int32_t check;      /* also check values in device memory (lengths, page_table, CSR), which synchronises; host memory is always checked */
  const char *engine; /* run on this engine only, e.g. "cpu-avx2"; null: on the engine with the least predicted time */
  int32_t score;      /* a strobe_score */
  int32_t reserved;   /* 0 */
  double beta;        /* for STROBE_HYPERBOLIC; > 0 */
  double shift;       /* for STROBE_HYPERBOLIC */
  /* The bits of a row of out, lse and dq depend only on its query, the keys that it sees and the options; the bits of dk and dv depend only
   * on their sequence and head: see docs/semantics.md. The engine is then the first one that accepts the dtype, head dimensions and
   * options. */
  int32_t invariant;
  int32_t reserved_invariant; /* 0 */
  const strobe_part *part;    /* the tensors hold a part of a larger problem; null: all of it */
  int32_t accumulate;         /* backward: adds to dq, dk and dv, which are then float32 (float64 if q is) */
  int32_t reserved_2;         /* 0 */
  int64_t k_scale_group;      /* 0: k_scale is per key and head; a multiple of 32: per column of this many rows of k */
  /* f(x, b, h, i, j), a real that takes the place of x = scale * q.k: ALiBi and bias are added to it, and -inf hides the key. With
   * STROBE_DOT and without softcap. b, h, i and j are those of the whole problem. */
  const strobe_function *score_function;
  const strobe_function *mask_function; /* g(b, h, i, j), a boolean: false hides the key, as every other mask may */
} strobe_attention;

/* ON WHAT. The forward reads the inputs and writes out and lse. The backward reads all of these and writes the gradients, except null ones.
 * Tensors that are read may share memory. A tensor that is written shares no byte with any other tensor, and its strides are
 * positive on axes with several elements; it may be interleaved with another, as tensors cut out of one buffer are. Overlap is found
 * exactly, unless strides are so irregular that this would take long: then tensors whose memory ranges meet are refused. */
typedef struct strobe_tensors {
  uint64_t size;
  const strobe_tensor *q, *k, *v;
  const strobe_tensor *mask; /* bool, true = attend; (B|1, H|1, Sq|1, Sk|1); varlen: per sequence, (.., max_seqlen_q|1, max_seqlen_k|1) */
  const strobe_tensor *bias; /* added to the score; shaped like mask; q's dtype or float32 (float64 if q is) */
  const strobe_tensor *alibi_slopes; /* float32 (H) or (B,H): -slope * |i + offset - j| is added to the score */
  const strobe_tensor *sinks;        /* float32 (float64 if q is), (H): a logit that joins the denominator and has no value */
  const strobe_tensor *cu_seqlens_q; /* int32 (B+1): sequence b has the tokens [cu[b], cu[b+1]); padding follows cu[B] */
  const strobe_tensor *cu_seqlens_k; /* given with cu_seqlens_q, but not with page_table */
  const strobe_tensor *block_rows;   /* int32 (B|1, H|1, nq+1): query block r keeps block_cols[rows[r] .. rows[r+1] - 1] */
  const strobe_tensor *block_cols;   /* int32 (kept): key blocks, strictly ascending within a row */
  const strobe_tensor *block_rows_t; /* the transpose, int32 (B|1, H|1, nk+1) and int32 (kept): optional, but some engines need it */
  const strobe_tensor *block_cols_t;
  const strobe_tensor *rng; /* int64 (2): seed and offset, on the device of q; they are read when the work runs */
  const strobe_tensor *out; /* q's dtype; float64 for the reference */
  const strobe_tensor *lse; /* float32 (float64 if q is); optional in the forward, needed in the backward */
  /* backward */
  const strobe_tensor *dout;
  const strobe_tensor *dlse; /* optional: the gradient of lse */
  const strobe_tensor *dq, *dk, *dv;
  const strobe_tensor *dbias;  /* bias's shape and dtype; it is summed over the axes where bias has size 1 */
  const strobe_tensor *dsinks; /* sinks' shape and dtype */
  /* both */
  const strobe_tensor *seqused_k; /* int32 (B): only the first seqused_k[b] keys of sequence b count */
  /* forward, written where given; lse's dtype. They take another pass over the scores, and column_sums needs lse. */
  const strobe_tensor *max_logit;   /* (B,H): the largest score after bias and masks; -inf if nothing is visible. Sinks do not count */
  const strobe_tensor *column_sums; /* (B,H,Sk), varlen (H,Tk): sums of P over the queries, before dropout */
  const strobe_tensor *delta;       /* with a partial part, instead of out: the sum of dout * out of each row; dlse's shape, lse's dtype */
  /* forward: int32 (B, pages of a sequence). k and v are pools of pages; key j of sequence b is row j % page of their page
   * page_table[b][j / page]. Sk is the number of keys that a row of the table has room for. Entries past the last key that counts are
   * not read. */
  const strobe_tensor *page_table;
  /* forward: the scales of quantised k and v, float16 or float32. Each stored number stands for itself times its scale. They have the
   * shape of k and v without the last axis, or (Hkv), or are one number, of rank 0 or shape (1); with k_scale_group, k_scale has k's
   * shape, but ceil(rows / k_scale_group) on the axis of rows. */
  const strobe_tensor *k_scale, *v_scale;
  /* what STROBE_OP_LOAD reads: bool, int32, int64 or a float dtype, of any shape that has elements */
  const strobe_tensor *captured_0, *captured_1, *captured_2, *captured_3, *captured_4, *captured_5, *captured_6, *captured_7;
  /* backward: the gradient of captured_n, a float tensor that score_function reads; of its shape, and in its dtype, float32 or float64.
   * Each element is the sum over all LOADs that read it. */
  const strobe_tensor *dcaptured_0, *dcaptured_1, *dcaptured_2, *dcaptured_3, *dcaptured_4, *dcaptured_5, *dcaptured_6, *dcaptured_7;
  /* int32 (kept), for the entries of block_cols and of block_cols_t: other than 0 promises that mask_function sees every pair of the block,
   * so that engines need not evaluate it there. Optional; with the transpose both are given. */
  const strobe_tensor *block_full, *block_full_t;
  /* jvp and backward_jvp: the tangents of inputs, which are the direction of the derivative. Each has its input's shape and dtype; that of
   * captured_n, a float tensor that score_function reads, may also be float32 or float64. An absent one is 0. */
  const strobe_tensor *tq, *tk, *tv, *tbias, *tsinks;
  const strobe_tensor *tcaptured_0, *tcaptured_1, *tcaptured_2, *tcaptured_3, *tcaptured_4, *tcaptured_5, *tcaptured_6, *tcaptured_7;
  const strobe_tensor *tdout, *tdlse; /* backward_jvp: the tangents of dout and dlse; absent ones are 0 */
  const strobe_tensor *tout, *tlse;   /* the derivatives of out and lse, in their shapes and dtypes: jvp writes, backward_jvp reads them */
} strobe_tensors;

/* A parallel region that the caller provides. It must run body(arg, i) once for each i in [0, n), on any number of threads, and
 * return when all are done. */
typedef void (*strobe_parallel)(void *pool, int32_t n, void (*body)(void *arg, int32_t i), void *arg);

/* WITH WHAT. A null pointer stands for a strobe_execution of zeros. */
typedef struct strobe_execution {
  uint64_t size;
  int32_t threads; /* CPU: how many threads to use; 0: as many as the process may run on */
  /* CUDA: how many of the GPU's multiprocessors are left to other work, such as communication; from 0 to one fewer than there are. Grids
   * that would be as large as the GPU shrink, and their work is divided among the multiprocessors that remain. docs/reference.md says
   * what other grids do. */
  int32_t reserved_sms;
  strobe_parallel parallel; /* CPU: runs the work in parallel; null: threads start and end with the call, so that fork is safe afterwards */
  void *pool;               /* passed to parallel */
  void *stream;             /* CUDA: a CUstream */
  void *workspace;          /* at least strobe_workspace_size() bytes, aligned to 256, on q's device; null: allocated for the call */
  uint64_t workspace_bytes;
  /* Provides the workspace if `workspace` is null and one is needed: aligned to 256, and alive until the call's work is done. Null: it
   * comes from host memory, or from the stream's memory pool. */
  void *(*allocate)(void *allocator, uint64_t bytes);
  void *allocator; /* passed to allocate */
} strobe_execution;

/* What would run. Strings live as long as the library. */
typedef struct strobe_plan {
  uint64_t size;
  const char *engine;       /* e.g. "cpu-avx512" */
  int64_t tile_q, tile_k;   /* the tile (Br, Bc) that runs */
  uint64_t workspace_bytes; /* on q's device; linear in the sequence, plus a byte per 16 queries x 32 keys of a mask (CPU) */
  double predicted_seconds;
} strobe_plan;

/* The kinds of refusals. */
typedef enum strobe_code {
  STROBE_CODE_MISSING = 1,   /* absent, and needed */
  STROBE_CODE_EXCLUDED = 2,  /* given beside an argument that excludes it, or without one that it needs */
  STROBE_CODE_VERSION = 3,   /* the size of a struct, or a field that has to be zero */
  STROBE_CODE_VALUE = 4,     /* a number, flag or choice that is not accepted */
  STROBE_CODE_UNKNOWN = 5,   /* a name that this library does not have */
  STROBE_CODE_ELSEWHERE = 6, /* a name that libraries for other processors have */
  STROBE_CODE_RANK = 7,      /* the number of axes */
  STROBE_CODE_SHAPE = 8,     /* the size of an axis */
  STROBE_CODE_HEAD_DIM = 9,  /* the head dimension */
  STROBE_CODE_HEADS = 10,    /* the number of heads */
  STROBE_CODE_DTYPE = 11,
  STROBE_CODE_DEVICE = 12,
  STROBE_CODE_MEMORY = 13,  /* an address, or strides */
  STROBE_CODE_OVERLAP = 14, /* memory that another tensor has as well */
  STROBE_CODE_LENGTH = 15,  /* a sequence that is longer than the space for it */
  STROBE_CODE_LIST = 16,    /* other wrong numbers in a list */
  STROBE_CODE_SIZE = 17     /* a problem that is larger than engines can count */
} strobe_code;

typedef enum strobe_value_kind {
  STROBE_VALUE_INTEGER = 1,
  STROBE_VALUE_NUMBER = 2,
  STROBE_VALUE_TEXT = 3,     /* text */
  STROBE_VALUE_ARGUMENT = 4, /* text: the name of an argument */
  STROBE_VALUE_ABSENT = 5,   /* no value; text: how C writes it: 0, null or none */
  STROBE_VALUE_DTYPES = 6,   /* sizes: one or more strobe_dtype */
  STROBE_VALUE_SIZES = 7,    /* sizes: the size, or the stride, of each axis */
  STROBE_VALUE_AXES = 8,     /* roles, sizes and or_one: the axes that are accepted */
  STROBE_VALUE_AXIS = 9      /* integer: the index of an axis of the argument */
} strobe_value_kind;

typedef struct strobe_value {
  uint64_t size;  /* written by the library */
  int32_t kind;   /* a strobe_value_kind */
  int32_t or_one; /* of axes: bit n says that axis n may also have size 1, and is then broadcast */
  int64_t integer;
  double number;
  const char *text;         /* "" unless the kind has one */
  size_t count;             /* the number of entries of sizes and of roles; 0 if the kind has none */
  const int64_t *sizes;     /* of axes: -1 where every size is accepted */
  const char *const *roles; /* of axes: "B", "Hkv", ...; else null */
} strobe_value;

/* Why one argument was refused, in parts from which a caller can make a text in terms of its own. */
typedef struct strobe_refusal {
  uint64_t size;        /* written by the library */
  const char *argument; /* e.g. "q", "part.seqlens_q", "execution.threads" */
  int32_t code;         /* a strobe_code */
  int32_t n_values;
  const char *words; /* e.g. "{0} heads for the {1} of {2}; accepted are the divisors of {1}": {n} is the place of the n-th value */
  const strobe_value *const *values;
} strobe_refusal;

STROBE_API const char *strobe_version(void);
STROBE_API const char *strobe_last_error(void);
/* The n-th refusal of this thread's last failure, or null past the last one. After STROBE_INVALID_ARGUMENT, strobe_last_error() is made of
 * them: a line for each, "argument: words". After other failures there are none. The record, and all that it points to, is valid until
 * this thread's next failure. */
STROBE_API const strobe_refusal *strobe_last_refusal(size_t n);
STROBE_API const char *strobe_status_name(int32_t status);

STROBE_API int32_t strobe_forward(const strobe_attention *, const strobe_tensors *, const strobe_execution *);
STROBE_API int32_t strobe_backward(const strobe_attention *, const strobe_tensors *, const strobe_execution *);
/* Forward mode: writes tout and, where given, tlse, out and lse, in one pass. */
STROBE_API int32_t strobe_jvp(const strobe_attention *, const strobe_tensors *, const strobe_execution *);
/* Writes to dq, dk, dv, dbias, dsinks and dcaptured_n the derivatives of these gradients. It reads out and lse of strobe_forward, and tout and
 * tlse of strobe_jvp with the same tangents. With tdout and tdlse absent and cotangents of dq, dk, ... as tangents it is the backward of
 * strobe_backward: then tout and tlse are the gradients of dout and dlse. */
STROBE_API int32_t strobe_backward_jvp(const strobe_attention *, const strobe_tensors *, const strobe_execution *);

/* Validates the call, then says what would run and how much workspace it needs. */
STROBE_API int32_t strobe_make_plan(const strobe_attention *, const strobe_tensors *, const strobe_execution *, int32_t direction,
                                    strobe_plan *plan);
STROBE_API int32_t strobe_workspace_size(const strobe_attention *, const strobe_tensors *, const strobe_execution *, int32_t direction,
                                         uint64_t *bytes);

/* A call that is validated once, with its engine chosen, so that it can run often on other addresses. It keeps shapes, strides,
 * dtypes, devices and options, but no addresses. Several threads may run it at the same time. */
typedef struct strobe_prepared strobe_prepared;

/* The addresses of a prepared call's tensors: null if the call was prepared without the tensor. Whether an address is a multiple of 16
 * decides how memory is read. Each address must therefore be a multiple of 16 if, and only if, it was one when the call was prepared. */
typedef struct strobe_addresses {
  uint64_t size;
  void *q, *k, *v, *mask, *bias, *alibi_slopes, *sinks, *cu_seqlens_q, *cu_seqlens_k;
  void *block_rows, *block_cols, *block_rows_t, *block_cols_t, *rng, *out, *lse;
  void *dout, *dlse, *dq, *dk, *dv, *dbias, *dsinks;
  void *seqused_k;
  void *max_logit, *column_sums;
  void *delta;
  void *page_table;
  void *k_scale, *v_scale;
  void *captured_0, *captured_1, *captured_2, *captured_3, *captured_4, *captured_5, *captured_6, *captured_7;
  void *dcaptured_0, *dcaptured_1, *dcaptured_2, *dcaptured_3, *dcaptured_4, *dcaptured_5, *dcaptured_6, *dcaptured_7;
  void *block_full, *block_full_t;
  void *tq, *tk, *tv, *tbias, *tsinks;
  void *tcaptured_0, *tcaptured_1, *tcaptured_2, *tcaptured_3, *tcaptured_4, *tcaptured_5, *tcaptured_6, *tcaptured_7;
  void *tdout, *tdlse, *tout, *tlse;
} strobe_addresses;

/* Keeps only threads and reserved_sms of the execution. On success *prepared is written; the caller has to release it. */
STROBE_API int32_t strobe_prepare(const strobe_attention *, const strobe_tensors *, const strobe_execution *, int32_t direction,
                                  strobe_prepared **prepared);
STROBE_API int32_t strobe_prepared_plan(const strobe_prepared *, strobe_plan *plan);
/* Does what strobe_forward or strobe_backward does, with every check. execution.threads and reserved_sms must be 0, or what they were when
 * the call was prepared. A packed call in host memory without max_seqlen is planned again if its longest sequence has another length than
 * when it was prepared, and it may then need another workspace. */
STROBE_API int32_t strobe_run(const strobe_prepared *, const strobe_addresses *, const strobe_execution *);
STROBE_API void strobe_release(strobe_prepared *); /* accepts null; no run may be under way */

/* Reports in words what strobe_make_plan finds: the call, each engine's plan or its reason against, the choice, and what was rounded.
 * Writes at most capacity bytes, always with a terminator; needed (optional) receives the whole length including the terminator. */
STROBE_API int32_t strobe_explain(const strobe_attention *, const strobe_tensors *, const strobe_execution *, int32_t direction, char *text,
                                  size_t capacity, size_t *needed);

/* Compiles the kernels that the call would run on a GPU of this compute capability (90 for 9.0) into the kernel cache, or finds them there.
 * It needs NVRTC but no GPU. The tensors must say that they lie on a CUDA device; only their shapes, strides and the alignment of their
 * addresses count. The text has a line per kernel: "compiled|cached <registers> <bytes spilled> <1 if its wgmma are serialized, else 0>
 * <name>". It is written as by strobe_explain. */
STROBE_API int32_t strobe_prewarm(const strobe_attention *, const strobe_tensors *, int32_t direction, int32_t compute_capability,
                                  char *text, size_t capacity, size_t *needed);
/* Names the kernels that strobe_prewarm would compile or find, and compiles none: a line per kernel, "cached|missing <name>". */
STROBE_API int32_t strobe_kernels(const strobe_attention *, const strobe_tensors *, int32_t direction, int32_t compute_capability,
                                  char *text, size_t capacity, size_t *needed);

/* The engines of this library on this machine: the name of each, and the reason why it cannot run here (null if it can). Past the last one,
 * both return null. An engine that has a form for each device is listed twice. */
STROBE_API const char *strobe_engine_name(int32_t index);
STROBE_API const char *strobe_engine_missing(int32_t index);

/* Adds a folder of compiled kernels that is only read, like those of STROBE_CACHE_PATH, and after them, for the rest of the process. To be
 * called before the first call on a GPU. The Python package adds that of the package strobe-attention-kernels. */
STROBE_API int32_t strobe_add_kernel_folder(const char *folder);

/* The state of CUDA here, a line each for driver, devices, NVRTC, the compute capabilities (times ten) that NVRTC compiles for, and the
 * cache folder: paths and versions, or the reason why there is none.
 * The text is written as by strobe_explain. This call initialises the driver; a child that this process forks later cannot use CUDA. */
STROBE_API int32_t strobe_cuda_info(char *text, size_t capacity, size_t *needed);

/* The state of the table of tiles that `strobe tune` measures on a GPU and keeps beside the kernel cache, as lines "name = value":
 * "file", its path (empty without a cache folder); "format", "device" and "kernels", which the table must repeat to be used; and
 * "ignored", the reason if an existing table is not used. The text is written as by strobe_explain. */
STROBE_API int32_t strobe_tuning(int32_t device_index, char *text, size_t capacity, size_t *needed);

/* Writes keep, a bool (B,H,Sq,Sk) on the CPU, which is true where dropout keeps the element. Reads dropout, seed and offset of the
 * attention, or rng (int64 (2), on the CPU) instead of seed and offset. */
STROBE_API int32_t strobe_dropout_mask(const strobe_attention *, const strobe_tensor *rng, const strobe_tensor *keep,
                                       const strobe_execution *);

/* A mask function over the blocks of a problem of these sizes. b, h, i and j run over all of it. */
typedef struct strobe_block_mask {
  uint64_t size;
  const strobe_function *mask_function; /* g(b, h, i, j) */
  int64_t batch, heads;                 /* >= 0 */
  int64_t seqlen_q, seqlen_k;           /* >= 0; with cu_seqlens, the longest sequences */
  int64_t block_q, block_k;             /* 1 or more */
  int32_t alignment;                    /* a strobe_alignment, for STROBE_OP_OFFSET */
  /* 0: bounds of the values that g takes in a block decide; a block that they leave open is kept. 1: they are found for ever smaller parts
   * of such a block, down to single pairs, until it is certain whether some pair is visible, and whether all are. A block in which the
   * rounding of reals decides is still kept, because engines compute them in float32 or in float64. */
  int32_t exact;
  const strobe_tensor *captured_0, *captured_1, *captured_2, *captured_3; /* what g reads, on the device */
  const strobe_tensor *captured_4, *captured_5, *captured_6, *captured_7;
  int32_t device_type, device_index; /* where the lists and what g reads lie; 0: in host memory. With exact it is the CPU */
  void *stream;                      /* CUDA: a CUstream */
  void *workspace;                   /* CUDA: at least strobe_kept_blocks.workspace_bytes, aligned to 256; null: allocated for the call */
  uint64_t workspace_bytes;
} strobe_block_mask;

/* A block-sparse mask, as block_rows and block_cols of strobe_tensors have it. */
typedef struct strobe_kept_blocks {
  uint64_t size;
  int32_t *rows; /* has room for most_rows: those of a matrix are ceil(seqlen_q / block_q) + 1 offsets, absolute in cols */
  int32_t *cols; /* has room for most_kept, as has full */
  uint8_t *full; /* 1: every pair of the block is visible; 0: some pair may be hidden, so that g has to be evaluated */
  int64_t most_rows, most_kept;
  /* Written. There is one matrix for all sequences if g does not depend on b, and one for all heads if it does not depend on h. */
  int64_t batch, heads; /* the matrices: strobe_block_mask.batch or 1, heads or 1 */
  int64_t n_rows, kept; /* batch * heads * (blocks of queries + 1); the blocks that are kept */
  /* On a GPU, where `full` is null: the other lists of strobe_tensors. rows_t has room for most_rows_t, the others for most_kept. */
  int32_t *rows_t, *cols_t; /* block_rows_t and block_cols_t */
  int32_t *marks, *marks_t; /* block_full and block_full_t: what `full` says, for cols and for cols_t */
  int64_t most_rows_t;
  int64_t n_rows_t;         /* written: batch * heads * (blocks of keys + 1) */
  uint64_t workspace_bytes; /* written: what a workspace needs */
} strobe_kept_blocks;

/* Finds the blocks in which a mask function may see a pair, in time that is linear in the blocks at the borders of what is visible, and in
 * what g reads. Writes batch, heads, n_rows and kept; and rows, cols and full if there is room for them. For the sizes alone, most_rows
 * and most_kept are 0, and the pointers null.
 * On a GPU the work is linear in all blocks, of which there are at most 2^31 - 1. Kept blocks behind the room are left out. The call waits
 * for the stream, to know `kept`, unless it is asked for the sizes alone or the stream is captured, which takes room for all blocks: kept
 * is then the number of all blocks, the most that there may be. STROBE_UNSUPPORTED: there is no compiler or GPU, the function needs too
 * much of its shared memory, or reads tensors in too many ways. The CPU takes such a call. */
STROBE_API int32_t strobe_mask_blocks(const strobe_block_mask *, strobe_kept_blocks *);

/* The float64 reference on the CPU evaluates the formulas row by row; it is slow on purpose. Inputs may have any float dtype; out, lse and
 * all gradients are float64. With accumulate, dq, dk and dv may be float32 as well, unless q is float64.
 * rows (optional) selects queries by ascending flat indices, (b*H + h)*Sq + i or with varlen h*Tq + t. The forward then computes and writes
 * only these rows, and the backward only their dq; dbias and dsinks are then refused.
 * cols (optional) selects keys likewise, (b*Hkv + h)*Sk + j or with varlen h*Tk + t. The backward then computes only their dk and dv. */
typedef struct strobe_selection {
  uint64_t size;
  const int64_t *rows;
  int64_t n_rows;
  const int64_t *cols;
  int64_t n_cols;
} strobe_selection;
STROBE_API int32_t strobe_reference_forward(const strobe_attention *, const strobe_tensors *, const strobe_execution *,
                                            const strobe_selection *);
STROBE_API int32_t strobe_reference_backward(const strobe_attention *, const strobe_tensors *, const strobe_execution *,
                                             const strobe_selection *);

#ifdef __cplusplus
}
#endif
#endif
