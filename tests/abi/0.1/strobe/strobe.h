/* Strobe: exact softmax attention, forward and backward. The C ABI.
 *
 * Conventions
 *   - Every struct begins with `size` (set it to sizeof the struct): a library newer than its caller reads only what the caller has.
 *   - Zero is the default of every field. Where zero has a meaning of its own, a `has_*` flag says that the field is given.
 *   - Functions return a strobe_status; strobe_last_error() holds the text of this thread's last failure.
 *   - Nothing is launched and nothing written unless the whole call is valid. Nothing is printed. No exception leaves the library.
 *   - A tensor absent is a null pointer. The library never keeps a pointer after it returns.
 *
 * Shapes (B batch, H query heads, Hkv key heads (H a multiple of Hkv), Sq queries, Sk keys, D = Dqk head dimension, Dv value dimension)
 *   dense    q (B,H,Sq,D)   k (B,Hkv,Sk,D)   v (B,Hkv,Sk,Dv)   out, dout (B,H,Sq,Dv)   lse, dlse (B,H,Sq)
 *   varlen   q (Tq,H,D)     k (Tk,Hkv,D)     v (Tk,Hkv,Dv)     out, dout (Tq,H,Dv)     lse, dlse (H,Tq)     with both cu_seqlens (B+1)
 *   dq, dk, dv have the shapes of q, k, v. Any strides (in elements; 0 and negative included for what is read).
 *   docs/semantics.md holds the formulas.
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
#define STROBE_VERSION_MINOR 1
#define STROBE_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

typedef enum strobe_status {
  STROBE_OK = 0,
  STROBE_INVALID_ARGUMENT = 1, /* the text names the argument, what was wrong and what is accepted */
  STROBE_UNSUPPORTED = 2,      /* valid, but no engine here takes it; the text holds every engine's reason */
  STROBE_OUT_OF_MEMORY = 3,
  STROBE_DEVICE_ERROR = 4, /* a driver or compiler call failed */
  STROBE_INTERNAL = 5      /* a bug in Strobe */
} strobe_status;

typedef enum strobe_dtype {
  STROBE_FLOAT32 = 1,
  STROBE_FLOAT16 = 2,
  STROBE_BFLOAT16 = 3,
  STROBE_FLOAT64 = 4,
  STROBE_BOOL = 5, /* one byte: 0 is false, all else true */
  STROBE_INT32 = 6,
  STROBE_INT64 = 7
} strobe_dtype;

typedef enum strobe_device_type { STROBE_CPU = 0, STROBE_CUDA = 1 } strobe_device_type;

typedef enum strobe_alignment {
  STROBE_BOTTOM_RIGHT = 0, /* the last query sees the last key: offset = Sk - Sq */
  STROBE_TOP_LEFT = 1      /* the first query sees the first key: offset = 0 */
} strobe_alignment;

/* What becomes of x = scale * q.k before a bias or ALiBi is added. */
typedef enum strobe_score {
  STROBE_DOT = 0,       /* x; with softcap c * tanh(x / c) */
  STROBE_HYPERBOLIC = 1 /* -beta * arccosh(max(-x, 1)) - shift, x being a Lorentz product: see docs/hyperbolic.md */
} strobe_score;

/* The most that strobe_execution.threads, and strobe_attention.tile_q and tile_k, may be. */
enum { STROBE_MAX_THREADS = 1024, STROBE_MAX_TILE = 65536 };

typedef enum strobe_direction { STROBE_FORWARD = 0, STROBE_BACKWARD = 1 } strobe_direction;

/* A view of memory that the caller owns. rank <= 4; entries of shape and strides past rank are ignored; strides count elements. */
typedef struct strobe_tensor {
  void *data; /* may be null where the tensor has no element */
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t rank;
  int64_t shape[4];
  int64_t strides[4];
} strobe_tensor;

/* WHAT is computed, but for the tensors. */
typedef struct strobe_attention {
  uint64_t size;
  double scale; /* of q.k; unless has_scale 1/sqrt(D), and 1 with STROBE_HYPERBOLIC */
  int32_t has_scale;
  int32_t causal;          /* key j is visible to query i if j <= i + offset */
  int32_t alignment;       /* strobe_alignment: the offset of causal, window and ALiBi alike */
  int32_t has_window_left; /* j >= i + offset - window_left */
  int64_t window_left;     /* >= 0 */
  int64_t window_right;    /* >= 0; j <= i + offset + window_right */
  int32_t has_window_right;
  int32_t deterministic;    /* bitwise the same over runs; the CPU always is */
  double softcap;           /* c * tanh(s / c); 0: none */
  double dropout;           /* probability of dropping, in [0, 1); quantised to 1/256, see docs/semantics.md */
  uint64_t seed, offset;    /* of the dropout mask, unless strobe_tensors.rng is given */
  int64_t block_q, block_k; /* the blocks of the block-sparse mask, multiples of 16 */
  int64_t tile_q, tile_k;   /* a wish (Br, Bc); 0: the engine's own choice. explain() says to what it was rounded */
  /* Varlen only: upper bounds of the lengths, and the sizes of mask, bias and blocks. 0: these have Tq, Tk; the lengths have no bound that
   * would be known where cu_seqlens lies on a GPU, while in host memory the longest are found there. */
  int64_t max_seqlen_q, max_seqlen_k;
  int32_t exact_max;  /* keep the running maximum where an engine would do without */
  int32_t allow_tf32; /* let fp32 run as single-pass TF32 */
  int32_t strict;     /* refuse what would not run on the fastest engine of this device */
  int32_t check;      /* check what lies in device memory (cu_seqlens, CSR); synchronises. Host memory is always checked */
  const char *engine; /* only this engine, e.g. "cpu-avx2"; null: the one with the least predicted time */
  int32_t score;      /* strobe_score */
  int32_t reserved;
  double beta;  /* STROBE_HYPERBOLIC: > 0 */
  double shift; /* STROBE_HYPERBOLIC */
} strobe_attention;

/* ON WHAT. Forward reads the first part and writes out and lse; backward reads all and writes d*. A gradient left null is not computed. */
typedef struct strobe_tensors {
  uint64_t size;
  const strobe_tensor *q, *k, *v;
  const strobe_tensor *mask; /* bool, true = attend; (B|1, H|1, Sq|1, Sk|1); varlen: per sequence, (.., max_seqlen_q|1, max_seqlen_k|1) */
  const strobe_tensor *bias; /* added to the score; shaped like mask; q's dtype or float32 (float64 with float64) */
  const strobe_tensor *alibi_slopes; /* float32 (H) or (B,H): -slope * |i + offset - j| is added to the score */
  const strobe_tensor *sinks;        /* float32, or float64 with float64, (H): a logit that joins the denominator alone */
  const strobe_tensor *cu_seqlens_q; /* int32 (B+1), contiguous: sequence b holds tokens [cu[b], cu[b+1]); behind cu[B] is padding */
  const strobe_tensor *cu_seqlens_k; /* both or none */
  const strobe_tensor *block_rows; /* int32 (B|1, H|1, nq+1), contiguous: entries of block_cols that query block holds; absolute offsets */
  const strobe_tensor *block_cols; /* int32 (kept): key blocks, strictly ascending within a row */
  const strobe_tensor *block_rows_t; /* the transpose: int32 (B|1, H|1, nk+1) and int32 (kept); optional, engines that want it say so */
  const strobe_tensor *block_cols_t;
  const strobe_tensor *rng; /* int64 (2): seed, offset, on the device of q; read when the work runs */
  const strobe_tensor *out; /* q's dtype, but for the reference engine: float64 */
  const strobe_tensor *lse; /* float32 (float64 with float64); optional in forward, needed in backward */
  /* backward */
  const strobe_tensor *dout;
  const strobe_tensor *dlse; /* optional: the gradient through lse */
  const strobe_tensor *dq, *dk, *dv;
  const strobe_tensor *dbias;  /* bias's shape and dtype: summed over the axes where bias has size 1 */
  const strobe_tensor *dsinks; /* sinks' shape and dtype */
} strobe_tensors;

/* A parallel region of the caller's: run body(arg, i) once for each i in [0, n), on as many threads as it likes, and return when all are
 * done. */
typedef void (*strobe_parallel)(void *pool, int32_t n, void (*body)(void *arg, int32_t i), void *arg);

/* WITH WHAT. A null strobe_execution is one of zeros. */
typedef struct strobe_execution {
  uint64_t size;
  int32_t threads; /* CPU: how many to use; 0: as many as the process may run on */
  int32_t reserved;
  strobe_parallel parallel; /* CPU: how to run them; null: threads started for the call, so nothing outlives it and fork is safe */
  void *pool;               /* passed to parallel */
  void *stream;             /* CUDA: a CUstream */
  void *workspace;          /* at least strobe_workspace_size() bytes, aligned to 256, where q lies; null: allocated for the call */
  uint64_t workspace_bytes;
  void *(*allocate)(void *allocator, uint64_t bytes); /* where the workspace comes from if it is null and one is needed; aligned to 256,
                                                         alive until the call's work is done. Null: host memory, or the stream's own pool */
  void *allocator;                                    /* passed to allocate */
} strobe_execution;

/* What would run. Strings live as long as the library. */
typedef struct strobe_plan {
  uint64_t size;
  const char *engine;       /* e.g. "cpu-avx512" */
  int64_t tile_q, tile_k;   /* the tile (Br, Bc) that runs */
  uint64_t workspace_bytes; /* device or host scratch, linear in the sequence, but for a byte per 16 queries x 32 keys of a mask (CPU) */
  double predicted_seconds;
} strobe_plan;

STROBE_API const char *strobe_version(void);
STROBE_API const char *strobe_last_error(void);
STROBE_API const char *strobe_status_name(int32_t status);

STROBE_API int32_t strobe_forward(const strobe_attention *, const strobe_tensors *, const strobe_execution *);
STROBE_API int32_t strobe_backward(const strobe_attention *, const strobe_tensors *, const strobe_execution *);

/* Validates, then answers what would run and how much workspace it wants. */
STROBE_API int32_t strobe_make_plan(const strobe_attention *, const strobe_tensors *, const strobe_execution *, int32_t direction,
                                    strobe_plan *plan);
STROBE_API int32_t strobe_workspace_size(const strobe_attention *, const strobe_tensors *, const strobe_execution *, int32_t direction,
                                         uint64_t *bytes);

/* A call made ready once, to be run often on other addresses: it is validated and its engine is chosen; shapes, strides, dtypes, devices
 * and options are kept, addresses are not. Several threads may run it at the same time. */
typedef struct strobe_prepared strobe_prepared;

/* Where the tensors of a prepared call lie now: null where the call was prepared without one. Whether an address is a multiple of 16
 * decides how memory is read, so it has to be one where it was one when the call was prepared, and only there. */
typedef struct strobe_addresses {
  uint64_t size;
  void *q, *k, *v, *mask, *bias, *alibi_slopes, *sinks, *cu_seqlens_q, *cu_seqlens_k;
  void *block_rows, *block_cols, *block_rows_t, *block_cols_t, *rng, *out, *lse;
  void *dout, *dlse, *dq, *dk, *dv, *dbias, *dsinks;
} strobe_addresses;

/* Of the execution, the number of threads alone is kept. *prepared is written on success, and is the caller's to release. */
STROBE_API int32_t strobe_prepare(const strobe_attention *, const strobe_tensors *, const strobe_execution *, int32_t direction,
                                  strobe_prepared **prepared);
STROBE_API int32_t strobe_prepared_plan(const strobe_prepared *, strobe_plan *plan);
/* As strobe_forward or strobe_backward, every check included. execution.threads: 0, or as prepared. Without max_seqlen a call of host
 * memory is planned anew where the longest sequence has another length than when it was prepared, and may want another workspace. */
STROBE_API int32_t strobe_run(const strobe_prepared *, const strobe_addresses *, const strobe_execution *);
STROBE_API void strobe_release(strobe_prepared *); /* null is allowed; when no run is under way */

/* The same walk in words: what was asked, each engine's plan or reason, what was chosen and what was rounded. Writes at most capacity bytes
 * (always terminated); needed (optional) receives the whole length with its terminator. */
STROBE_API int32_t strobe_explain(const strobe_attention *, const strobe_tensors *, const strobe_execution *, int32_t direction, char *text,
                                  size_t capacity, size_t *needed);

/* Compiles what the call would run on a GPU of this compute capability (90 for 9.0) into the kernel cache, or finds it there. Needs NVRTC
 * but no GPU; of the tensors, which say that they lie on a CUDA device, shapes, strides and the alignment of addresses count. The text is a
 * line per kernel: "compiled|cached <registers> <bytes spilled> <1 if its wgmma are serialized, else 0> <name>"; written as by
 * strobe_explain. */
STROBE_API int32_t strobe_prewarm(const strobe_attention *, const strobe_tensors *, int32_t direction, int32_t compute_capability,
                                  char *text, size_t capacity, size_t *needed);

/* The engines of this library on this machine: name, and the reason why it cannot run here (null if it can). Returns null past the last.
   A name that has a form for each device stands there twice. */
STROBE_API const char *strobe_engine_name(int32_t index);
STROBE_API const char *strobe_engine_missing(int32_t index);

/* CUDA here, a line each: driver, devices, NVRTC, cache folder, with paths and versions, or the reason why not. Writes as strobe_explain
 * does. Initialises the driver, after which a forked child of this process cannot use CUDA. */
STROBE_API int32_t strobe_cuda_info(char *text, size_t capacity, size_t *needed);

/* Of the table of tiles that `strobe tune` measures on a GPU and keeps beside the kernel cache, as JSON: "file", where it lies (empty
 * without a cache folder); "format", "device" and "kernels", which it has to repeat to be used; "ignored", why the one that is there is
 * not. Writes as strobe_explain does. */
STROBE_API int32_t strobe_tuning(int32_t device_index, char *text, size_t capacity, size_t *needed);

/* keep: bool (B,H,Sq,Sk) on the CPU; true where dropout keeps the element. Reads attention.dropout, seed, offset (or rng, int64 (2),
 * CPU). */
STROBE_API int32_t strobe_dropout_mask(const strobe_attention *, const strobe_tensor *rng, const strobe_tensor *keep,
                                       const strobe_execution *);

/* The float64 reference (CPU): the formulas, row by row; slow on purpose. Inputs of any float dtype; out, lse and all gradients are float64
 * here. rows (optional): only these flat queries, ascending ((b*H + h)*Sq + i; varlen h*Tq + t), are computed and written in forward; in
 * backward only their dq; dbias and dsinks are then an error. cols (optional): in backward only these flat keys ((b*Hkv + h)*Sk + j; varlen
 * h*Tk + t) of dk and dv. */
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
