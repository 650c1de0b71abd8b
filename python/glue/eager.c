/* strobe._eager: repeated calls of torch tensors, made with as few Python objects as possible.
 *
 * Nothing here depends on PyTorch's ABI, except its stable part. Tensors are read by the DLPack C exchange API (PyTorch 2.10 and
 * later) or by their Python attributes. Their storage's size comes from PyTorch's C shim or their methods. PyTorch's own functions
 * allocate the results. Compiled for CPython's stable ABI. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

#include "glue.h"

/* --- PyTorch's functions ------------------------------------------------------------------------------------------------------------ */

static struct {
  PyObject *tensor, *parameter, *strided;
  PyObject *is_neg, *is_zero, *data_ptr, *stride, *storage, *offset; /* methods of torch.Tensor */
  PyObject *storage_bytes;                                           /* of torch.UntypedStorage */
  PyObject *functorch, *modes, *tracing, *forward_ad;
  PyObject *grad, *threads, *deterministic, *any_autocast, *autocast, *autocast_dtype;
  PyObject *empty_strided, *empty_cpu, *empty_cuda; /* the latter two are PyTorch's fastest ways, absent in some versions */
  PyObject *device_now, *stream_now;                /* absent where PyTorch has no CUDA */
  PyObject *uint8;
  struct {
    PyObject *shape, *dtype, *device, *layout, *type, *index, *requires_grad, *level, *itemsize;
  } name;
} torch;

/* Two functions of PyTorch's C shim, whose ABI is stable. A handle is the address of an at::Tensor; _cdata returns the same address. The
 * at::Tensor lies in the Python object, `place` bytes from its beginning. place = 0: methods are used instead. */
static struct {
  int32_t (*storage_bytes)(const void *handle, int64_t *);
  int32_t (*offset)(const void *handle, int64_t *);
  size_t place, found;
} shim;

static PyObject *refused; /* the exception that is raised if a call needs the full path */

static int32_t (*run_prepared)(const strobe_prepared *, int32_t, const uint8_t *, const uintptr_t *, int32_t, uintptr_t, uintptr_t,
                               uint64_t); /* strobe_glue_run, in another library: strobe._core */

/* Returns Py_None and clears the error. If the error must not be dropped (e.g. KeyboardInterrupt), keeps it and returns NULL. */
static PyObject *nothing(void) {
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

/* Calls a function without arguments. Returns 1 for True, 0 for False, -1 for anything else. */
static int is_true(PyObject *function) {
  PyObject *found = PyObject_CallNoArgs(function);
  Py_XDECREF(found); /* the objects True and False always exist */
  return found == Py_True ? 1 : found == Py_False ? 0 : -1;
}

static int is_true_of(PyObject *function, PyObject *x) {
  PyObject *found = PyObject_CallFunctionObjArgs(function, x, NULL);
  Py_XDECREF(found);
  return found == Py_True ? 1 : found == Py_False ? 0 : -1;
}

/* Calls a function without arguments that returns an integer. Returns -1 with an error. */
static long long number(PyObject *function) {
  PyObject *found = PyObject_CallNoArgs(function);
  const long long n = found ? PyLong_AsLongLong(found) : -1;
  Py_XDECREF(found);
  return n;
}

/* Whether no transform or mode intercepts the call. Python code asks whether a compiler does, because the compiler has to see that
 * question. */
static int is_alone(void) {
  if (is_true(torch.functorch) != 0 || is_true(torch.tracing) != 0 || number(torch.modes) != 0) return 0;
  PyObject *level = PyObject_GetAttr(torch.forward_ad, torch.name.level);
  const long at = level ? PyLong_AsLong(level) : 0;
  Py_XDECREF(level);
  return at < 0;
}

/* --- Tensors ------------------------------------------------------------------------------------------------------------------------ */

/* Those parts of the DLPack ABI, version 1, that this file uses, under names of its own. */
struct dl_tensor {
  void *data;
  int32_t device_type, device_index, rank;
  uint8_t kind, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct dl_header {
  uint32_t major, minor;
  struct dl_header *older;
};
struct dl_exchange {
  struct dl_header header;
  void *allocate, *managed_of, *object_of;
  int (*tensor_of)(void *object, struct dl_tensor *);
  void *stream;
};

static const struct dl_exchange *exchange;  /* NULL: tensors are read by their attributes */
static const struct dl_exchange *available; /* the exchange API of this PyTorch version */

enum { ON_CPU = 1, ON_CUDA = 2, MOST_AXES = 8 }; /* numbers of devices in DLPack */

struct view {
  void *data;
  const int64_t *shape, *strides;
  uint64_t dtype; /* a number that the reading function chooses */
  int32_t device_type, device_index, rank, item_bytes;
  int64_t own[2 * MOST_AXES]; /* shape and strides may point here */
};

static int copy_integers(PyObject *tuple, int64_t *to, Py_ssize_t count) {
  if (!tuple || PyTuple_Size(tuple) != count) return 0;
  for (Py_ssize_t i = 0; i < count; i++) to[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  return !PyErr_Occurred();
}

static void *address_by_call(PyObject *x) {
  PyObject *found = PyObject_CallFunctionObjArgs(torch.data_ptr, x, NULL);
  void *address = found ? PyLong_AsVoidPtr(found) : NULL;
  Py_XDECREF(found);
  return address;
}

static int place(PyObject *device, struct view *t) {
  PyObject *type = PyObject_GetAttr(device, torch.name.type), *index = PyObject_GetAttr(device, torch.name.index);
  t->device_type = !type                                                 ? 0
                   : PyUnicode_CompareWithASCIIString(type, "cpu") == 0  ? ON_CPU
                   : PyUnicode_CompareWithASCIIString(type, "cuda") == 0 ? ON_CUDA
                                                                         : 0;
  t->device_index = index && index != Py_None ? (int32_t)PyLong_AsLong(index) : 0;
  Py_XDECREF(type);
  Py_XDECREF(index);
  return t->device_type && !PyErr_Occurred();
}

static int read_by_attributes(PyObject *x, struct view *t) {
  PyObject *layout = PyObject_GetAttr(x, torch.name.layout), *shape = NULL, *strides = NULL, *dtype = NULL, *device = NULL;
  int good = layout == torch.strided && (shape = PyObject_GetAttr(x, torch.name.shape)) && PyTuple_Check(shape) &&
             (strides = PyObject_CallFunctionObjArgs(torch.stride, x, NULL)) && (dtype = PyObject_GetAttr(x, torch.name.dtype)) &&
             (device = PyObject_GetAttr(x, torch.name.device)) && place(device, t);
  if (good) {
    t->rank = (int32_t)PyTuple_Size(shape);
    t->dtype = (uintptr_t)dtype; /* each dtype is a single object that exists for ever */
    t->shape = t->own, t->strides = t->own + MOST_AXES;
    good = t->rank <= MOST_AXES && copy_integers(shape, t->own, t->rank) && copy_integers(strides, t->own + MOST_AXES, t->rank);
  }
  if (good) {
    PyObject *size = PyObject_GetAttr(dtype, torch.name.itemsize);
    t->item_bytes = size ? (int32_t)PyLong_AsLong(size) : 0;
    Py_XDECREF(size);
    if (size) t->data = address_by_call(x);
    good = !PyErr_Occurred();
  }
  Py_XDECREF(layout);
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  Py_XDECREF(dtype);
  Py_XDECREF(device);
  return good;
}

static int read_by_exchange(PyObject *x, struct view *t) {
  struct dl_tensor found;
  if (exchange->tensor_of(x, &found) != 0 || found.rank > MOST_AXES) return 0;
  t->data = (char *)found.data + found.byte_offset;
  t->shape = found.shape, t->strides = found.strides;
  t->dtype = (uint64_t)found.lanes << 16 | (uint64_t)found.bits << 8 | found.kind;
  t->item_bytes = (found.lanes * found.bits + 7) / 8;
  t->device_type = found.device_type, t->device_index = found.device_index, t->rank = found.rank;
  return t->device_type == ON_CPU || t->device_type == ON_CUDA;
}

static int is_plain(PyObject *x) {
  PyTypeObject *type = Py_TYPE(x);
  return type == (PyTypeObject *)torch.tensor || type == (PyTypeObject *)torch.parameter;
}

static int read_plain(PyObject *x, struct view *t) { return exchange ? read_by_exchange(x, t) : read_by_attributes(x, t); }

/* Whether x is a plain tensor whose memory holds its numbers. Returns 0, perhaps with an error, for any other object. */
static int read_tensor(PyObject *x, struct view *t) {
  if (!is_plain(x) || is_true_of(torch.is_neg, x) != 0 || !read_plain(x, t)) return 0;
  return t->data || is_true_of(torch.is_zero, x) == 0; /* zeros that have not been written yet have no memory */
}

static int storage_by_calls(PyObject *x, int64_t *bytes, int64_t *offset) {
  PyObject *storage = PyObject_CallFunctionObjArgs(torch.storage, x, NULL);
  PyObject *size = storage ? PyObject_CallFunctionObjArgs(torch.storage_bytes, storage, NULL) : NULL;
  PyObject *first = size ? PyObject_CallFunctionObjArgs(torch.offset, x, NULL) : NULL;
  if (first) *bytes = PyLong_AsLongLong(size), *offset = PyLong_AsLongLong(first);
  Py_XDECREF(storage);
  Py_XDECREF(size);
  Py_XDECREF(first);
  return first && !PyErr_Occurred();
}

/* The size of x's storage in bytes, and where x begins in the storage, in elements. Returns 0, perhaps with an error, if these cannot be
 * determined. */
static int storage_of(PyObject *x, int64_t *bytes, int64_t *offset) {
  if (!shim.place) return storage_by_calls(x, bytes, offset);
  const void *handle = (const char *)x + shim.place;
  return shim.storage_bytes(handle, bytes) == 0 && shim.offset(handle, offset) == 0;
}

/* Whether the storage holds the tensor's last number. It does, unless it has been shortened. */
static int is_whole(PyObject *x, const struct view *t) {
  int64_t bytes, last;
  if (!storage_of(x, &bytes, &last)) return 0;
  for (int i = 0; i < t->rank; i++) {
    if (!t->shape[i]) return 1;
    last += (t->shape[i] - 1) * t->strides[i];
  }
  return (last + 1) * t->item_bytes <= bytes;
}

/* --- Keys: bytes that determine what runs ------------------------------------------------------------------------------------------ */

enum { MOST_BYTES = 4096, MOST_TENSORS = 80, LONG_TEXT = 256 };
_Static_assert(MOST_TENSORS >= sizeof(strobe_addresses) / sizeof(void *) - 1, "a call may have more tensors");

struct call {
  size_t size;
  int count, first_device, overflow;
  int of_any_size; /* whether the key leaves out shapes, strides and alignment */
  int32_t device_type, device_index;
  PyObject *tensors[MOST_TENSORS]; /* borrowed */
  uintptr_t at[MOST_TENSORS];
  uint8_t key[MOST_BYTES];
};

static void put(struct call *c, const void *bytes, size_t size) {
  if (size > MOST_BYTES - c->size) {
    c->overflow = 1;
    return;
  }
  memcpy(c->key + c->size, bytes, size);
  c->size += size;
}

static void put_byte(struct call *c, char byte) { put(c, &byte, 1); }

static void put_text(struct call *c, const char *text, Py_ssize_t size) {
  put(c, &size, sizeof size);
  put(c, text, (size_t)size);
}

static void begin(struct call *c) { c->size = 0, c->count = 0, c->overflow = 0, c->device_type = 0, c->of_any_size = 0; }

/* Adds the state of the process, which also determines what runs. */
static int put_process(struct call *c) {
  const long long threads = number(torch.threads);
  const int deterministic = is_true(torch.deterministic);
  if (threads < 0 || deterministic < 0) return 0;
  put_byte(c, exchange ? 'x' : 'a');
  put(c, &threads, sizeof threads);
  put_byte(c, (char)deterministic);
  return 1;
}

static int put_tensor(struct call *c, PyObject *x, int with_grad) {
  struct view t;
  if (c->count == MOST_TENSORS || !read_tensor(x, &t) || !is_whole(x, &t)) return 0;
  char flags = (char)(!c->of_any_size && (uintptr_t)t.data % 16 == 0);
  if (with_grad) {
    PyObject *tracked = PyObject_GetAttr(x, torch.name.requires_grad);
    if (!tracked) return 0;
    flags |= (char)((tracked == Py_True) << 1);
    Py_DECREF(tracked);
  }
  if (!c->count) c->device_type = t.device_type, c->device_index = t.device_index;
  put(c, &t.dtype, sizeof t.dtype);
  put(c, &t.device_type, sizeof t.device_type);
  put(c, &t.device_index, sizeof t.device_index);
  put(c, &t.rank, sizeof t.rank);
  if (!c->of_any_size) {
    put(c, t.shape, sizeof *t.shape * (size_t)t.rank);
    put(c, t.strides, sizeof *t.strides * (size_t)t.rank);
  }
  put_byte(c, flags);
  c->tensors[c->count] = x;
  c->at[c->count++] = (uintptr_t)t.data;
  return 1;
}

/* Adds a long text, such as that of a function, by its length and 128 bits: Python's hash, which the object keeps, and one of our own. */
static int put_long_text(struct call *c, PyObject *x, const char *text, Py_ssize_t size) {
  const Py_hash_t hash = PyObject_Hash(x);
  uint64_t own = 0x9e3779b97f4a7c15u ^ (uint64_t)size, word;
  for (Py_ssize_t at = 0; at < size; at += (Py_ssize_t)sizeof word) {
    word = 0;
    memcpy(&word, text + at, size - at < (Py_ssize_t)sizeof word ? (size_t)(size - at) : sizeof word);
    own = (own ^ word) * 0xff51afd7ed558ccdu;
    own ^= own >> 32;
  }
  put_byte(c, 'h');
  put(c, &size, sizeof size);
  put(c, &hash, sizeof hash);
  put(c, &own, sizeof own);
  return hash != -1;
}

/* Adds a value and its type, because in Python 1, 1.0 and True are equal. */
static int put_scalar(struct call *c, PyObject *x) {
  if (x == Py_None) return put_byte(c, 'n'), 1;
  if (x == Py_True || x == Py_False) return put_byte(c, x == Py_True ? 't' : 'f'), 1;
  if (PyFloat_CheckExact(x)) {
    const double value = PyFloat_AsDouble(x);
    put_byte(c, 'd');
    return put(c, &value, sizeof value), 1;
  }
  if (PyLong_CheckExact(x)) {
    int beyond;
    const long long value = PyLong_AsLongLongAndOverflow(x, &beyond);
    if (!beyond) {
      put_byte(c, 'i');
      return put(c, &value, sizeof value), 1;
    }
    const unsigned long long large = PyLong_AsUnsignedLongLong(x);
    put_byte(c, 'u');
    return put(c, &large, sizeof large), !PyErr_Occurred();
  }
  if (PyUnicode_CheckExact(x)) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(x, &size);
    if (!text) return 0;
    if (size > LONG_TEXT) return put_long_text(c, x, text, size);
    put_byte(c, 's');
    return put_text(c, text, size), 1;
  }
  return 0;
}

static int put_options(struct call *c, PyObject *options, int with_grad) {
  PyObject *name, *x;
  for (Py_ssize_t at = 0; PyDict_Next(options, &at, &name, &x);) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(name, &size);
    if (!text) return 0;
    put_text(c, text, size);
    if (is_plain(x)) {
      if (c->of_any_size) return 0;
      put_byte(c, 'T');
      if (!put_tensor(c, x, with_grad)) return 0;
    } else if (PyTuple_CheckExact(x)) {
      const Py_ssize_t count = PyTuple_Size(x);
      put_byte(c, 'S');
      put(c, &count, sizeof count);
      for (Py_ssize_t i = 0; i < count; i++)
        if (!put_scalar(c, PyTuple_GetItem(x, i))) return 0;
    } else if (!put_scalar(c, x)) {
      return 0;
    }
  }
  return 1;
}

static int put_tensors(struct call *c, PyObject *tuple) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  put(c, &count, sizeof count);
  for (Py_ssize_t i = 0; i < count; i++)
    if (!put_tensor(c, PyTuple_GetItem(tuple, i), 0)) return 0;
  return count >= 0;
}

static PyObject *key_of(const struct call *c) { return PyBytes_FromStringAndSize((const char *)c->key, (Py_ssize_t)c->size); }

/* --- PreparedCall: a call in one direction, without its addresses ------------------------------------------------------------------- */

struct made {           /* a result, uninitialised */
  PyObject *short_args; /* (shape, strides, dtype) */
  PyObject *args;       /* (shape, strides) */
  PyObject *keywords;   /* dtype and device */
};

struct prepared_call {
  PyObject ob_base;
  const strobe_prepared *prepared;
  PyObject *owner; /* the object that owns `prepared` */
  PyObject *function, *more;
  PyObject *fields, *form;         /* bytes; form may be NULL */
  struct made made[16], workspace; /* a backward makes up to 13: dq, dk, dv, dbias, dsinks and 8 of captured tensors */
  int made_count, fields_count;
  int32_t threads, device_type, device_index;
  uint64_t workspace_bytes;
};

static PyTypeObject *prepared_call_type;

static void drop(struct made *m) {
  Py_CLEAR(m->short_args);
  Py_CLEAR(m->args);
  Py_CLEAR(m->keywords);
}

static void prepared_call_free(PyObject *self) {
  struct prepared_call *r = (struct prepared_call *)self;
  PyTypeObject *type = Py_TYPE(self);
  for (int i = 0; i < r->made_count; i++) drop(&r->made[i]);
  drop(&r->workspace);
  Py_XDECREF(r->owner);
  Py_XDECREF(r->function);
  Py_XDECREF(r->more);
  Py_XDECREF(r->fields);
  Py_XDECREF(r->form);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

/* Describes a result by its shape, strides, dtype and device. */
static int describe(struct made *m, PyObject *shape, PyObject *strides, PyObject *dtype, PyObject *device) {
  m->short_args = PyTuple_Pack(3, shape, strides, dtype);
  m->args = PyTuple_Pack(2, shape, strides);
  m->keywords = Py_BuildValue("{sOsO}", "dtype", dtype, "device", device);
  return m->short_args && m->args && m->keywords;
}

static PyObject *prepared_call_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  static char *names[] = {"owner", "address", "fields", "made", "device", "workspace_bytes", "threads", "form", "function", "more", NULL};
  PyObject *owner, *fields, *made, *device, *form, *function, *more;
  unsigned long long address, workspace_bytes;
  int threads;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OKSO!OKiOOO", names, &owner, &address, &fields, &PyTuple_Type, &made, &device,
                                   &workspace_bytes, &threads, &form, &function, &more))
    return NULL;
  struct prepared_call *r = (struct prepared_call *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); /* zeros */
  if (!r) return NULL;
  struct view where = {0};
  r->prepared = (const strobe_prepared *)(uintptr_t)address;
  r->owner = Py_NewRef(owner), r->fields = Py_NewRef(fields), r->more = Py_NewRef(more);
  r->function = function == Py_None ? NULL : Py_NewRef(function);
  r->form = form == Py_None ? NULL : Py_NewRef(form);
  r->fields_count = (int)PyBytes_Size(fields);
  r->workspace_bytes = workspace_bytes, r->threads = threads;
  const Py_ssize_t count = PyTuple_Size(made);
  int good = count <= (Py_ssize_t)(sizeof r->made / sizeof *r->made) && r->fields_count <= MOST_TENSORS && place(device, &where) &&
             (form == Py_None || PyBytes_Check(form));
  r->device_type = where.device_type, r->device_index = where.device_index;
  for (Py_ssize_t i = 0; good && i < count; i++) {
    PyObject *shape, *strides, *dtype;
    good = PyArg_ParseTuple(PyTuple_GetItem(made, i), "OOO", &shape, &strides, &dtype) &&
           describe(&r->made[r->made_count++], shape, strides, dtype, device);
  }
  if (good && workspace_bytes) {
    PyObject *shape = Py_BuildValue("(K)", workspace_bytes), *strides = Py_BuildValue("(i)", 1);
    good = shape && strides && describe(&r->workspace, shape, strides, torch.uint8, device);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
  }
  if (good) return (PyObject *)r;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no call that can be prepared");
  Py_DECREF((PyObject *)r);
  return NULL;
}

/* PyTorch's fastest function that makes a tensor on this device; NULL if there is none. */
static PyObject *short_way(const struct prepared_call *r) {
  if (r->device_type == ON_CPU) return torch.empty_cpu;
  /* The function for CUDA makes tensors on the current device. */
  return torch.empty_cuda && torch.device_now && number(torch.device_now) == r->device_index ? torch.empty_cuda : NULL;
}

static PyObject *make(const struct made *m, PyObject *maker, uintptr_t *address) {
  PyObject *x = maker ? PyObject_Call(maker, m->short_args, NULL) : PyObject_Call(torch.empty_strided, m->args, m->keywords);
  struct dl_tensor found;
  if (!x) return NULL;
  if (!exchange) {
    *address = (uintptr_t)address_by_call(x);
  } else if (exchange->tensor_of(x, &found) == 0) {
    *address = (uintptr_t)found.data + found.byte_offset;
  }
  if (!PyErr_Occurred()) return x;
  Py_DECREF(x);
  return NULL;
}

/* The results, arranged by the bytes of `form`: indices of results, or 255 for None. Without `form`: a tuple of all results, or the only
 * one. */
static PyObject *formed(const struct prepared_call *r, PyObject **made) {
  const Py_ssize_t count = r->form ? PyBytes_Size(r->form) : r->made_count;
  if (!r->form && count == 1) return Py_NewRef(made[0]);
  const uint8_t *form = r->form ? (const uint8_t *)PyBytes_AsString(r->form) : NULL;
  PyObject *all = PyTuple_New(count);
  for (Py_ssize_t i = 0; all && i < count; i++) {
    const int place = form ? form[i] : (int)i;
    PyTuple_SetItem(all, i, Py_NewRef(place < r->made_count ? made[place] : Py_None));
  }
  return all;
}

/* Runs the call at the addresses of c, to which it adds those of the results. Returns None if the library refuses; the full path then says
 * why. */
static PyObject *run(const struct prepared_call *r, struct call *c) {
  PyObject *made[sizeof r->made / sizeof *r->made], *workspace = NULL, *found = NULL;
  uintptr_t stream = 0, scratch = 0;
  int count = 0, good = c->count + r->made_count == r->fields_count;
  PyObject *maker = good ? short_way(r) : NULL;
  good = good && !PyErr_Occurred();
  for (; good && count < r->made_count; count += good)
    good = (made[count] = make(&r->made[count], maker, &c->at[c->count + count])) != NULL;
  if (good && r->device_type == ON_CUDA) {
    PyObject *index = PyLong_FromLong(r->device_index);
    PyObject *current = index ? PyObject_CallFunctionObjArgs(torch.stream_now, index, NULL) : NULL;
    stream = current ? (uintptr_t)PyLong_AsVoidPtr(current) : 0;
    Py_XDECREF(index);
    Py_XDECREF(current);
    good = !PyErr_Occurred();
  }
  if (good && r->workspace_bytes) good = (workspace = make(&r->workspace, maker, &scratch)) != NULL;
  if (good) {
    int32_t status;
    const uint8_t *fields = (const uint8_t *)PyBytes_AsString(r->fields);
    Py_BEGIN_ALLOW_THREADS;
    status = run_prepared(r->prepared, r->fields_count, fields, c->at, r->threads, stream, scratch, r->workspace_bytes);
    Py_END_ALLOW_THREADS;
    if (status == STROBE_OK && !(found = formed(r, made))) good = 0;
  }
  Py_XDECREF(workspace);
  while (count) Py_DECREF(made[--count]);
  return found ? found : nothing();
}

/* run(*tensors): the call's arrays, in the order of its fields. */
static PyObject *prepared_call_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  struct call c;
  begin(&c);
  if (count > MOST_TENSORS) return nothing();
  for (; c.count < count; c.count++) {
    struct view t;
    if (!read_tensor(args[c.count], &t)) return nothing();
    c.at[c.count] = (uintptr_t)t.data;
  }
  return run((struct prepared_call *)self, &c);
}

static PyObject *prepared_call_more(PyObject *self, void *unused) {
  (void)unused;
  return Py_NewRef(((struct prepared_call *)self)->more);
}

/* --- The module's functions --------------------------------------------------------------------------------------------------------- */

/* Returns a new reference, because another thread may drop the call from the memory; NULL if the call is not prepared. */
static struct prepared_call *known(PyObject *calls, const struct call *c) {
  PyObject *key = key_of(c), *found = key ? PyDict_GetItemWithError(calls, key) : NULL;
  Py_XDECREF(key);
  return found && Py_TYPE(found) == prepared_call_type ? (struct prepared_call *)Py_NewRef(found) : NULL;
}

/* Arguments: a prefix; tensors, whose meaning the prefix determines; arrays and options, by name. */
static int sign(struct call *c, PyObject *const *args) {
  char *bytes;
  Py_ssize_t size;
  begin(c);
  if (PyBytes_AsStringAndSize(args[0], &bytes, &size) < 0 || !PyTuple_Check(args[1]) || !PyDict_Check(args[2]) || !PyDict_Check(args[3]))
    return 0;
  put_byte(c, 'O');
  put_text(c, bytes, size);
  return put_process(c) && put_tensors(c, args[1]) && put_options(c, args[2], 0) && put_options(c, args[3], 0) && !c->overflow;
}

static PyObject *eager_key(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  struct call c;
  (void)self;
  return count == 4 && sign(&c, args) ? key_of(&c) : nothing();
}

/* Runs the call on r, if r is not NULL, and takes over the reference to r. */
static PyObject *ran(struct prepared_call *r, struct call *c) {
  if (!r) return nothing();
  PyObject *found = run(r, c);
  Py_DECREF((PyObject *)r);
  return found;
}

static PyObject *eager_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  struct call c;
  (void)self;
  if (count != 5 || !sign(&c, args + 1)) return nothing();
  return ran(known(args[0], &c), &c);
}

/* Arguments: q, k, v, return_lse, options of strobe.attention(). of_any_size: for the key of calls that differ in sizes alone; none has it
   whose options have tensors. */
static int sign_attention(struct call *c, PyObject *const *args, int of_any_size) {
  begin(c);
  c->of_any_size = of_any_size;
  if (!is_plain(args[0]) || (args[3] != Py_True && args[3] != Py_False) || !PyDict_Check(args[4]) || !is_alone()) return 0;
  const int with_grad = is_true(torch.grad);
  const int autocast = torch.any_autocast ? is_true(torch.any_autocast) : 1;
  if (with_grad < 0 || autocast < 0) return 0;
  put_byte(c, of_any_size ? 'S' : 'A');
  put_byte(c, (char)(with_grad << 1 | (args[3] == Py_True)));
  if (!put_process(c)) return 0;
  for (int i = 0; i < 3; i++)
    if (!put_tensor(c, args[i], with_grad)) return 0;
  PyObject *dtype = NULL; /* autocast's dtype; NULL without autocast */
  if (autocast) {
    PyObject *type = PyUnicode_FromString(c->device_type == ON_CPU ? "cpu" : "cuda");
    const int here = type ? is_true_of(torch.autocast, type) : -1;
    if (here == 1) dtype = PyObject_CallFunctionObjArgs(torch.autocast_dtype, type, NULL);
    Py_XDECREF(type);
    if (here < 0 || (here && !dtype)) return 0;
  }
  put(c, &dtype, sizeof dtype);
  Py_XDECREF(dtype);
  return put_options(c, args[4], with_grad) && !c->overflow;
}

static PyObject *eager_attention_key(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  struct call c;
  (void)self;
  return count == 5 && sign_attention(&c, args, 0) ? key_of(&c) : nothing();
}

static PyObject *eager_attention_kind(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  struct call c;
  (void)self;
  return count == 5 && sign_attention(&c, args, 1) ? key_of(&c) : nothing();
}

static PyObject *eager_attention(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  struct call c;
  (void)self;
  if (count != 6 || !sign_attention(&c, args + 1, 0)) return nothing();
  struct prepared_call *r = known(args[0], &c);
  if (!r || !r->function) return ran(r, &c);
  PyObject *all = PyTuple_New(1 + c.count);
  if (!all) {
    Py_DECREF((PyObject *)r);
    return NULL;
  }
  PyTuple_SetItem(all, 0, (PyObject *)r);
  for (int i = 0; i < c.count; i++) PyTuple_SetItem(all, 1 + i, Py_NewRef(c.tensors[i]));
  PyObject *found = PyObject_Call(r->function, all, NULL);
  Py_DECREF(all);
  if (found || !PyErr_ExceptionMatches(refused)) return found;
  return nothing();
}

/* Arguments: prefix, needed, dout, dlse or None, saved tensors. */
static int sign_gradients(struct call *c, PyObject *const *args) {
  begin(c);
  char *bytes;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(args[0], &bytes, &size) < 0 || !PyTuple_Check(args[1]) || !PyTuple_Check(args[4])) return 0;
  if (!is_alone() || is_true(torch.grad) != 0) return 0; /* a gradient of the gradient is refused elsewhere */
  put_byte(c, 'G');
  put_text(c, bytes, size);
  for (Py_ssize_t i = 0; i < PyTuple_Size(args[1]); i++) put_byte(c, PyTuple_GetItem(args[1], i) == Py_True);
  put_byte(c, args[3] != Py_None);
  return put_process(c) && put_tensor(c, args[2], 0) && (args[3] == Py_None || put_tensor(c, args[3], 0)) && put_tensors(c, args[4]) &&
         !c->overflow;
}

static PyObject *eager_gradients_key(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  struct call c;
  (void)self;
  return count == 5 && sign_gradients(&c, args) ? key_of(&c) : nothing();
}

static PyObject *eager_gradients(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  struct call c;
  (void)self;
  if (count != 6 || !sign_gradients(&c, args + 1)) return nothing();
  return ran(known(args[0], &c), &c);
}

/* is_whole(x): True for a plain tensor whose storage holds its last number. False for other objects, and if that cannot be determined. */
static PyObject *eager_is_whole(PyObject *self, PyObject *x) {
  (void)self;
  struct view t;
  if (is_plain(x) && read_plain(x, &t) && is_whole(x, &t)) Py_RETURN_TRUE;
  PyErr_Clear();
  Py_RETURN_FALSE;
}

/* connect(address of strobe_glue_run) */
static PyObject *eager_connect(PyObject *self, PyObject *address) {
  (void)self;
  *(void **)&run_prepared = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

/* by_attributes(True), for tests: reads tensors as in PyTorch before 2.10, and their storage without the shim. */
static PyObject *eager_by_attributes(PyObject *self, PyObject *wanted) {
  (void)self;
  const int attributes = PyObject_IsTrue(wanted);
  exchange = attributes ? NULL : available;
  shim.place = attributes ? 0 : shim.found;
  return PyBool_FromLong(exchange == NULL);
}

static PyMethodDef functions[] = {
    {"key", (PyCFunction)(void (*)(void))eager_key, METH_FASTCALL, NULL},
    {"run", (PyCFunction)(void (*)(void))eager_run, METH_FASTCALL, NULL},
    {"attention_key", (PyCFunction)(void (*)(void))eager_attention_key, METH_FASTCALL, NULL},
    {"attention_kind", (PyCFunction)(void (*)(void))eager_attention_kind, METH_FASTCALL, NULL},
    {"attention", (PyCFunction)(void (*)(void))eager_attention, METH_FASTCALL, NULL},
    {"gradients_key", (PyCFunction)(void (*)(void))eager_gradients_key, METH_FASTCALL, NULL},
    {"gradients", (PyCFunction)(void (*)(void))eager_gradients, METH_FASTCALL, NULL},
    {"is_whole", eager_is_whole, METH_O, NULL},
    {"connect", eager_connect, METH_O, NULL},
    {"by_attributes", eager_by_attributes, METH_O, NULL},
    {0},
};

static PyMethodDef prepared_call_functions[] = {{"run", (PyCFunction)(void (*)(void))prepared_call_run, METH_FASTCALL, NULL}, {0}};
static PyGetSetDef prepared_call_attributes[] = {{"more", prepared_call_more, NULL, NULL, NULL}, {0}};
static PyType_Slot prepared_call_slots[] = {{Py_tp_new, prepared_call_new},
                                            {Py_tp_dealloc, prepared_call_free},
                                            {Py_tp_methods, prepared_call_functions},
                                            {Py_tp_getset, prepared_call_attributes},
                                            {0}};
static PyType_Spec prepared_call_spec = {"strobe._eager.PreparedCall", sizeof(struct prepared_call), 0, Py_TPFLAGS_DEFAULT,
                                         prepared_call_slots};

/* The object at a dotted path below an imported module; NULL if there is none, without an error if it may be absent. */
static PyObject *found_at(PyObject *from, const char *path, int may_be_absent) {
  char name[64];
  PyObject *at = Py_NewRef(from);
  while (at && *path) {
    size_t length = strcspn(path, ".");
    memcpy(name, path, length), name[length] = 0;
    path += length + (path[length] == '.');
    PyObject *next = PyObject_GetAttrString(at, name);
    Py_DECREF(at);
    at = next;
  }
  if (!at && may_be_absent) PyErr_Clear();
  return at;
}

static const struct dl_exchange *exchange_of(PyObject *tensor) {
  PyObject *capsule = found_at(tensor, "__dlpack_c_exchange_api__", 1);
  struct dl_header *header = capsule && PyCapsule_CheckExact(capsule) ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
  PyErr_Clear();
  Py_XDECREF(capsule); /* its target exists for ever */
  while (header && header->major != 1) header = header->older;
  const struct dl_exchange *found = (const struct dl_exchange *)header;
  return found && found->tensor_of ? found : NULL;
}

/* The place of x's at::Tensor within x, according to _cdata; 0 if it does not lie there. */
static size_t place_of_handle(PyObject *x) {
  PyObject *cdata = PyObject_GetAttrString(x, "_cdata"), *size = PyObject_GetAttrString((PyObject *)Py_TYPE(x), "__basicsize__");
  void *impl = cdata ? PyLong_AsVoidPtr(cdata) : NULL;
  const size_t end = size ? PyLong_AsSize_t(size) : 0;
  size_t place = sizeof(PyObject);
  Py_XDECREF(cdata);
  Py_XDECREF(size);
  if (!impl || PyErr_Occurred()) return 0;
  while (place + sizeof impl <= end && memcmp((const char *)x + place, &impl, sizeof impl) != 0) place += sizeof impl;
  return place + sizeof impl <= end ? place : 0;
}

/* Fills `shim`, if it agrees with PyTorch's Python functions for a tensor, a view and a parameter. */
static void find_shim(PyObject *module) {
  void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return;
  *(void **)&shim.storage_bytes = dlsym(library, "aoti_torch_get_storage_size");
  *(void **)&shim.offset = dlsym(library, "aoti_torch_get_storage_offset");
  dlclose(library);
  PyObject *zeros = found_at(module, "zeros", 0), *shape = Py_BuildValue("(ii)", 2, 3), *on_cpu = Py_BuildValue("{ss}", "device", "cpu");
  PyObject *args = shape ? PyTuple_Pack(1, shape) : NULL;
  PyObject *x = zeros && args && on_cpu ? PyObject_Call(zeros, args, on_cpu) : NULL;
  PyObject *all[] = {x, x ? PyObject_CallMethod(x, "select", "ii", 0, 1) : NULL,
                     x ? PyObject_CallFunctionObjArgs(torch.parameter, x, NULL) : NULL};
  const size_t place = x && shim.storage_bytes && shim.offset ? place_of_handle(x) : 0;
  int good = place != 0;
  for (int i = 0; i < 3; i++) {
    int64_t found[2], expected[2];
    if (good && all[i] && place_of_handle(all[i]) == place && storage_by_calls(all[i], expected, expected + 1)) {
      shim.place = place;
      good = storage_of(all[i], found, found + 1) && found[0] == expected[0] && found[1] == expected[1];
    } else {
      good = 0;
    }
    Py_XDECREF(all[i]);
  }
  shim.place = shim.found = good ? place : 0;
  PyErr_Clear();
  Py_XDECREF(zeros);
  Py_XDECREF(shape);
  Py_XDECREF(on_cpu);
  Py_XDECREF(args);
}

static int find_torch(void) {
  PyObject *module = PyImport_ImportModule("torch"), *forward_ad = PyImport_ImportModule("torch.autograd.forward_ad");
  if (!module || !forward_ad) return 0;
  torch.forward_ad = forward_ad;
  const struct {
    PyObject **to;
    const char *path;
    int may_be_absent;
  } all[] = {
      {&torch.tensor, "Tensor", 0},
      {&torch.parameter, "nn.Parameter", 0},
      {&torch.strided, "strided", 0},
      {&torch.uint8, "uint8", 0},
      {&torch.is_neg, "Tensor.is_neg", 0},
      {&torch.is_zero, "Tensor._is_zerotensor", 0},
      {&torch.data_ptr, "Tensor.data_ptr", 0},
      {&torch.stride, "Tensor.stride", 0},
      {&torch.storage, "Tensor.untyped_storage", 0},
      {&torch.offset, "Tensor.storage_offset", 0},
      {&torch.storage_bytes, "UntypedStorage.nbytes", 0},
      {&torch.functorch, "_C._are_functorch_transforms_active", 0},
      {&torch.modes, "_C._len_torch_dispatch_stack", 0},
      {&torch.tracing, "_C._is_tracing", 0},
      {&torch.grad, "is_grad_enabled", 0},
      {&torch.threads, "get_num_threads", 0},
      {&torch.deterministic, "_C._get_deterministic_algorithms", 0},
      {&torch.any_autocast, "_C._is_any_autocast_enabled", 1},
      {&torch.autocast, "is_autocast_enabled", 0},
      {&torch.autocast_dtype, "get_autocast_dtype", 0},
      {&torch.empty_strided, "empty_strided", 0},
      {&torch.empty_cpu, "_C._dynamo.guards._empty_strided_cpu", 1},
      {&torch.empty_cuda, "_C._dynamo.guards._empty_strided_cuda", 1},
      {&torch.device_now, "_C._cuda_getDevice", 1},
      {&torch.stream_now, "_C._cuda_getCurrentRawStream", 1},
  };
  int good = 1;
  for (size_t i = 0; good && i < sizeof all / sizeof *all; i++) {
    *all[i].to = found_at(module, all[i].path, all[i].may_be_absent);
    good = *all[i].to || all[i].may_be_absent;
  }
  if (good) exchange = available = exchange_of(torch.tensor), find_shim(module);
  Py_DECREF(module);
  return good;
}

static int find_names(void) {
  torch.name.shape = PyUnicode_InternFromString("shape");
  torch.name.dtype = PyUnicode_InternFromString("dtype");
  torch.name.device = PyUnicode_InternFromString("device");
  torch.name.layout = PyUnicode_InternFromString("layout");
  torch.name.type = PyUnicode_InternFromString("type");
  torch.name.index = PyUnicode_InternFromString("index");
  torch.name.requires_grad = PyUnicode_InternFromString("requires_grad");
  torch.name.itemsize = PyUnicode_InternFromString("itemsize");
  torch.name.level = PyUnicode_InternFromString("_current_level");
  return !PyErr_Occurred();
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_eager", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__eager(void) {
  PyObject *made = PyModule_Create(&module);
  if (!made) return NULL;
  refused = PyErr_NewException("strobe._eager.RefusedError", NULL, NULL);
  prepared_call_type = (PyTypeObject *)PyType_FromSpec(&prepared_call_spec);
  if (refused && prepared_call_type && find_names() && find_torch() && PyModule_AddObjectRef(made, "RefusedError", refused) == 0 &&
      PyModule_AddObjectRef(made, "PreparedCall", (PyObject *)prepared_call_type) == 0 &&
      PyModule_AddObjectRef(made, "HAS_SHIM", shim.found ? Py_True : Py_False) == 0)
    return made;
  Py_DECREF(made);
  return NULL;
}
