/* Strobe as custom calls of XLA's typed FFI, for JAX: handlers that read a call's options from attributes and its tensors from buffers.
 *
 * The attributes are those that python/strobe/jax/_program.py writes:
 *   operands, results     the names of the tensors, as members of strobe_tensors, with spaces between them
 *   swapped               those among them whose axes 1 and 2 change places: (B,S,H,D) becomes the library's (B,H,S,D)
 *   threads, reserved_sms members of strobe_execution
 *   part                  the integers of an encoded strobe.Part
 *   score_function, ...   8 integers for each node: operation, captured, inputs, the bits of real, integer
 *   any other             a member of strobe_attention of this name
 * third_party/xla/ffi/api/c_api.h is XLA's, as jaxlib 0.10.2 ships it (API version 0.3). What is used here lies in the same places from
 * version 0.1 (jaxlib 0.7.2) to 0.5 (jaxlib 0.12.0); structs only grow at their ends. */
#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "glue.h"
#include "xla/ffi/api/c_api.h"

enum { MOST_TENSORS = (sizeof(strobe_tensors) - sizeof(uint64_t)) / sizeof(void *), MOST_AXES = 4, NODE = 8 };

enum kind { REAL, WHOLE, WIDE, OTHER };

struct member {
  const char *name;
  size_t offset;
  enum kind kind;
};

static const struct member kOptions[] = {
#define STROBE_OPTION(name)                                                                                                                \
  {#name, offsetof(strobe_attention, name),                                                                                                \
   _Generic(((strobe_attention *)0)->name, double: REAL, int32_t: WHOLE, int64_t: WIDE, uint64_t: WIDE, default: OTHER)},
#include "strobe/fields.inc"
};

static const struct member kTensors[] = {
#define STROBE_TENSOR(name, place) {#name, offsetof(strobe_tensors, name), OTHER},
#include "strobe/fields.inc"
};

static int is(XLA_FFI_ByteSpan text, const char *word) { return text.len == strlen(word) && !memcmp(text.ptr, word, text.len); }

static const struct member *found(const struct member *table, size_t count, XLA_FFI_ByteSpan name) {
  for (size_t i = 0; i < count; i++)
    if (is(name, table[i].name)) return &table[i];
  return NULL;
}

/* Takes the first word off a text; an empty one if there is none. */
static XLA_FFI_ByteSpan next_word(XLA_FFI_ByteSpan *text) {
  size_t end = 0;
  while (end < text->len && text->ptr[end] != ' ') end++;
  const XLA_FFI_ByteSpan word = {text->ptr, end};
  const size_t taken = end + (end < text->len);
  text->ptr += taken;
  text->len -= taken;
  return word;
}

static int has_word(XLA_FFI_ByteSpan text, XLA_FFI_ByteSpan name) {
  while (text.len) {
    const XLA_FFI_ByteSpan word = next_word(&text);
    if (word.len == name.len && !memcmp(word.ptr, name.ptr, name.len)) return 1;
  }
  return 0;
}

/* A call as the handler has decoded it. */
struct call {
  strobe_attention attention;
  strobe_tensors tensors;
  strobe_tensor views[MOST_TENSORS];
  strobe_execution execution;
  strobe_part part;
  strobe_tensor lists[4]; /* of part */
  strobe_function functions[2];
  char *engine;
  XLA_FFI_ByteSpan operands, results, swapped;
  int64_t threads, reserved_sms;
  int count;        /* of views */
  char problem[96]; /* why the call cannot be decoded; empty if it can */
};

static int refuse(struct call *call, const char *what, XLA_FFI_ByteSpan name) {
  snprintf(call->problem, sizeof call->problem, "%s %.*s", what, (int)(name.len < 40 ? name.len : 40), name.ptr);
  return 0;
}

static XLA_FFI_Array array_of(XLA_FFI_AttrType type, const void *attribute) {
  const XLA_FFI_Array none = {XLA_FFI_DataType_INVALID, 0, NULL}, *array = attribute;
  return type == XLA_FFI_AttrType_ARRAY && array->dtype == XLA_FFI_DataType_S64 ? *array : none;
}

/* `size` integers of (B, n, 2), or of (B), behind *at, which moves on. 0 if they are not there. */
static int list_of(strobe_tensor *list, const int64_t **at, const int64_t *end, int ranges) {
  if (end - *at < (ranges ? 2 : 1)) return 0;
  const int64_t batch = (*at)[0], n = ranges ? (*at)[1] : 1;
  const int64_t *data = *at + (ranges ? 2 : 1);
  if (batch < 0 || n < 0 || n > end - *at) return 0;
  const int64_t per = ranges ? 2 * n : 1;
  if (batch && per > (end - data) / batch) return 0;
  *list = (strobe_tensor){.data = (void *)data, .dtype = STROBE_INT64, .rank = ranges ? 3 : 1, .shape = {batch}, .strides = {1}};
  if (ranges) {
    list->shape[1] = n, list->shape[2] = 2;
    list->strides[0] = per, list->strides[1] = 2, list->strides[2] = 1;
  }
  *at = data + batch * per;
  return 1;
}

/* The part, as Part.encoded() of python/strobe/_part.py writes it. */
static int part_of(struct call *call, XLA_FFI_Array array) {
  const int64_t *at = array.data, *end = at + array.size;
  if (array.size < 4) return 0;
  call->part =
      (strobe_part){.size = sizeof(strobe_part), .partial = (int32_t)at[0], .first_head = at[1], .heads = at[2], .first_batch = at[3]};
  at += 4;
  for (int i = 0; i < 4; i++)
    if (!list_of(&call->lists[i], &at, end, i < 2)) return 0;
  call->part.q_ranges = &call->lists[0], call->part.k_ranges = &call->lists[1];
  call->part.seqlens_q = &call->lists[2], call->part.seqlens_k = &call->lists[3];
  call->attention.part = &call->part;
  return 1;
}

static int function_of(strobe_function *function, XLA_FFI_Array array) {
  const size_t count = array.size / NODE;
  if (!count || array.size % NODE) return 0;
  strobe_node *nodes = calloc(count, sizeof *nodes);
  if (!nodes) return 0;
  const int64_t *at = array.data;
  for (size_t n = 0; n < count; n++, at += NODE) {
    nodes[n].operation = (int32_t)at[0];
    nodes[n].captured = (int32_t)at[1];
    for (int i = 0; i < 4; i++) nodes[n].inputs[i] = (int32_t)at[2 + i];
    memcpy(&nodes[n].real, &at[6], sizeof nodes[n].real);
    nodes[n].integer = at[7];
  }
  *function = (strobe_function){.size = sizeof *function, .nodes = nodes, .n_nodes = (int64_t)count};
  return 1;
}

static int scalar_of(struct call *call, XLA_FFI_ByteSpan name, const XLA_FFI_Scalar *scalar) {
  const struct member *member = found(kOptions, sizeof kOptions / sizeof *kOptions, name);
  char *to = (char *)&call->attention + (member ? member->offset : 0);
  if (member && member->kind == REAL && scalar->dtype == XLA_FFI_DataType_F64) return memcpy(to, scalar->value, sizeof(double)), 1;
  if (scalar->dtype != XLA_FFI_DataType_S64) return refuse(call, "an unknown number", name);
  int64_t x;
  memcpy(&x, scalar->value, sizeof x);
  if ((!member || member->kind == WHOLE) && x != (int32_t)x) return refuse(call, "a number beyond 32 bits", name);
  if (is(name, "threads")) return call->threads = x, 1;
  if (is(name, "reserved_sms")) return call->reserved_sms = x, 1;
  if (!member || (member->kind != WHOLE && member->kind != WIDE)) return refuse(call, "an unknown option", name);
  const int32_t whole = (int32_t)x;
  return memcpy(to, member->kind == WHOLE ? (void *)&whole : (void *)&x, member->kind == WHOLE ? sizeof whole : sizeof x), 1;
}

static int text_of(struct call *call, XLA_FFI_ByteSpan name, const XLA_FFI_ByteSpan *text) {
  if (is(name, "operands")) return call->operands = *text, 1;
  if (is(name, "results")) return call->results = *text, 1;
  if (is(name, "swapped")) return call->swapped = *text, 1;
  if (!is(name, "engine")) return refuse(call, "an unknown text", name);
  call->engine = calloc(text->len + 1, 1);
  if (!call->engine) return refuse(call, "no memory for", name);
  memcpy(call->engine, text->ptr, text->len);
  call->attention.engine = call->engine;
  return 1;
}

static int attribute_of(struct call *call, XLA_FFI_AttrType type, XLA_FFI_ByteSpan name, const void *attribute) {
  if (type == XLA_FFI_AttrType_STRING) return text_of(call, name, attribute);
  if (type == XLA_FFI_AttrType_SCALAR) return scalar_of(call, name, attribute);
  const XLA_FFI_Array array = array_of(type, attribute);
  if (is(name, "part") && part_of(call, array)) return 1;
  const int of_mask = is(name, "mask_function");
  if ((of_mask || is(name, "score_function")) && function_of(&call->functions[of_mask], array)) {
    *(of_mask ? &call->attention.mask_function : &call->attention.score_function) = &call->functions[of_mask];
    return 1;
  }
  return refuse(call, "an unknown list", name);
}

static int32_t dtype_of(XLA_FFI_DataType dtype) {
  switch (dtype) {
  case XLA_FFI_DataType_PRED:
    return STROBE_BOOL;
  case XLA_FFI_DataType_S8:
    return STROBE_INT8;
  case XLA_FFI_DataType_U8:
    return STROBE_UINT8;
  case XLA_FFI_DataType_S32:
    return STROBE_INT32;
  case XLA_FFI_DataType_S64:
    return STROBE_INT64;
  case XLA_FFI_DataType_F16:
    return STROBE_FLOAT16;
  case XLA_FFI_DataType_BF16:
    return STROBE_BFLOAT16;
  case XLA_FFI_DataType_F32:
    return STROBE_FLOAT32;
  case XLA_FFI_DataType_F64:
    return STROBE_FLOAT64;
  case XLA_FFI_DataType_F8E4M3FN:
    return STROBE_FLOAT8_E4M3;
  case XLA_FFI_DataType_F8E5M2:
    return STROBE_FLOAT8_E5M2;
  default:
    return 0; /* which the library refuses */
  }
}

static int tensor_of(struct call *call, XLA_FFI_ByteSpan name, const XLA_FFI_Buffer *buffer, int32_t device_type, int32_t device_index) {
  const struct member *member = found(kTensors, sizeof kTensors / sizeof *kTensors, name);
  if (!member || call->count == MOST_TENSORS || buffer->rank > MOST_AXES) return refuse(call, "an unknown tensor", name);
  strobe_tensor *t = &call->views[call->count++];
  int64_t strides[MOST_AXES], shape[MOST_AXES], rank = buffer->rank, size = 1;
  for (int64_t axis = rank - 1; axis >= 0; axis--) {
    shape[axis] = buffer->dims[axis];
    strides[axis] = size;
    size *= shape[axis];
  }
  int32_t dtype = dtype_of(buffer->dtype);
  if (is(name, "rng") && buffer->dtype == XLA_FFI_DataType_U32 && rank == 1 && shape[0] == 4) { /* the halves of two numbers */
    dtype = STROBE_INT64;
    shape[0] = 2;
  }
  strobe_glue_tensor(t, (uintptr_t)buffer->data, dtype, device_type, device_index, (int32_t)rank, shape, strides,
                     rank >= MOST_AXES - 1 && has_word(call->swapped, name));
  memcpy((char *)&call->tensors + member->offset, &t, sizeof t);
  return 1;
}

static int decode(struct call *call, const XLA_FFI_CallFrame *frame, int32_t device_type, int32_t device_index) {
  call->attention.size = sizeof call->attention;
  call->tensors.size = sizeof call->tensors;
  for (int64_t i = 0; i < frame->attrs.size; i++)
    if (!attribute_of(call, frame->attrs.types[i], *frame->attrs.names[i], frame->attrs.attrs[i])) return 0;
  for (int64_t i = 0; i < frame->args.size; i++)
    if (!tensor_of(call, next_word(&call->operands), frame->args.args[i], device_type, device_index)) return 0;
  for (int64_t i = 0; i < frame->rets.size; i++)
    if (!tensor_of(call, next_word(&call->results), frame->rets.rets[i], device_type, device_index)) return 0;
  return 1;
}

static XLA_FFI_Error *failed(const XLA_FFI_Api *api, XLA_FFI_Error_Code code, const char *words) {
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = words, .errc = code};
  return api->XLA_FFI_Error_Create(&args);
}

static XLA_FFI_Error *refused(const XLA_FFI_Api *api, int32_t status) {
  const XLA_FFI_Error_Code code = status == STROBE_INVALID_ARGUMENT ? XLA_FFI_Error_Code_INVALID_ARGUMENT
                                  : status == STROBE_UNSUPPORTED    ? XLA_FFI_Error_Code_UNIMPLEMENTED
                                  : status == STROBE_OUT_OF_MEMORY  ? XLA_FFI_Error_Code_RESOURCE_EXHAUSTED
                                                                    : XLA_FFI_Error_Code_INTERNAL;
  return failed(api, code, strobe_last_error());
}

/* A workspace of XLA's own device memory, for one call. */
struct scratch {
  const XLA_FFI_CallFrame *frame;
  void *data;
  size_t bytes;
};

static void *allocate(void *allocator, uint64_t bytes) {
  struct scratch *scratch = allocator;
  const XLA_FFI_Api *api = scratch->frame->api;
  XLA_FFI_DeviceMemory_Allocate_Args args = {
      .struct_size = XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE, .ctx = scratch->frame->ctx, .size = bytes, .alignment = 256};
  XLA_FFI_Error *error = api->XLA_FFI_DeviceMemory_Allocate(&args);
  if (error) {
    XLA_FFI_Error_Destroy_Args destroyed = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = error};
    api->XLA_FFI_Error_Destroy(&destroyed);
    return NULL;
  }
  scratch->data = args.data;
  scratch->bytes = bytes;
  return args.data;
}

static XLA_FFI_Error *run(struct call *call, const XLA_FFI_CallFrame *frame, int32_t direction) {
  int32_t (*const functions[])(const strobe_attention *, const strobe_tensors *,
                               const strobe_execution *) = {strobe_forward, strobe_backward, strobe_jvp, strobe_backward_jvp};
  const int32_t status = functions[direction](&call->attention, &call->tensors, &call->execution);
  return status == STROBE_OK ? NULL : refused(frame->api, status);
}

/* XLA's threads take denormals for zero, which would change what FP8 means. Threads that the call starts inherit this thread's state. */
static XLA_FFI_Error *on_cpu(struct call *call, const XLA_FFI_CallFrame *frame, int32_t direction) {
  fenv_t of_xla;
  fegetenv(&of_xla);
  fesetenv(FE_DFL_ENV);
  strobe_glue_execution(&call->execution, (int32_t)call->threads);
  XLA_FFI_Error *error = run(call, frame, direction);
  fesetenv(&of_xla);
  return error;
}

/* The memory of the workspace goes back to XLA before the work is done: what is allocated next is used later in the stream's order. */
static XLA_FFI_Error *on_cuda(struct call *call, const XLA_FFI_CallFrame *frame, int32_t direction) {
  XLA_FFI_Stream_Get_Args stream = {.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE, .ctx = frame->ctx};
  XLA_FFI_Error *error = frame->api->XLA_FFI_Stream_Get(&stream);
  if (error) return error;
  struct scratch scratch = {.frame = frame};
  call->execution = (strobe_execution){.size = sizeof call->execution,
                                       .reserved_sms = (int32_t)call->reserved_sms,
                                       .stream = stream.stream,
                                       .allocate = allocate,
                                       .allocator = &scratch};
  error = run(call, frame, direction);
  if (scratch.data) {
    XLA_FFI_DeviceMemory_Free_Args args = {
        .struct_size = XLA_FFI_DeviceMemory_Free_Args_STRUCT_SIZE, .ctx = frame->ctx, .size = scratch.bytes, .data = scratch.data};
    XLA_FFI_Error *of_free = frame->api->XLA_FFI_DeviceMemory_Free(&args);
    if (error && of_free) {
      XLA_FFI_Error_Destroy_Args of_no_use = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = of_free};
      frame->api->XLA_FFI_Error_Destroy(&of_no_use);
    }
    if (!error) error = of_free;
  }
  return error;
}

/* Answers XLA's question for the version at registration: with XLA's own, or the first one if XLA does not say it. */
static int tells_version(const XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((const XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = frame->api ? frame->api->api_version.minor_version : 1;
  metadata->traits = 0;
  return 1;
}

static XLA_FFI_Error *handle(XLA_FFI_CallFrame *frame, int32_t direction, int32_t device_type) {
  if (tells_version(frame) || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  XLA_FFI_DeviceOrdinal_Get_Args device = {.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, .ctx = frame->ctx};
  if (device_type == STROBE_CUDA) {
    if (frame->api->struct_size < XLA_FFI_Api_STRUCT_SIZE)
      return failed(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                    "Strobe: this jaxlib does not tell the device; accepted is a later one");
    XLA_FFI_Error *error = frame->api->XLA_FFI_DeviceOrdinal_Get(&device);
    if (error) return error;
  }
  struct call *call = calloc(1, sizeof *call);
  if (!call) return failed(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "out of host memory");
  XLA_FFI_Error *error;
  if (!decode(call, frame, device_type, device.device_ordinal)) {
    char words[256];
    snprintf(words, sizeof words, "%s: the program was compiled by another version of Strobe; accepted is one of %s", call->problem,
             strobe_version());
    error = failed(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT, words);
  } else {
    error = device_type == STROBE_CPU ? on_cpu(call, frame, direction) : on_cuda(call, frame, direction);
  }
  for (int i = 0; i < 2; i++) free((void *)call->functions[i].nodes);
  free(call->engine);
  free(call);
  return error;
}

#define HANDLER(name, direction)                                                                                                           \
  static XLA_FFI_Error *name##_on_cpu(XLA_FFI_CallFrame *frame) { return handle(frame, direction, STROBE_CPU); }                           \
  static XLA_FFI_Error *name##_on_cuda(XLA_FFI_CallFrame *frame) { return handle(frame, direction, STROBE_CUDA); }
HANDLER(forward, STROBE_FORWARD)
HANDLER(backward, STROBE_BACKWARD)
HANDLER(jvp, STROBE_JVP)
HANDLER(backward_jvp, STROBE_BACKWARD_JVP)

uintptr_t strobe_glue_xla_handler(int32_t direction, int32_t device_type) {
  XLA_FFI_Handler *const handlers[][2] = {{forward_on_cpu, forward_on_cuda},
                                          {backward_on_cpu, backward_on_cuda},
                                          {jvp_on_cpu, jvp_on_cuda},
                                          {backward_jvp_on_cpu, backward_jvp_on_cuda}};
  return (uintptr_t)handlers[direction][device_type == STROBE_CUDA];
}
