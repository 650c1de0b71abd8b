#include "glue.h"

void strobe_glue_tensor(strobe_tensor *t, uintptr_t data, int32_t dtype, int32_t device_type, int32_t device_index, int32_t rank,
                        const int64_t *shape, const int64_t *strides, int32_t swap_1_2) {
  t->data = (void *)data;
  t->dtype = dtype;
  t->device_type = device_type;
  t->device_index = device_index;
  t->rank = rank;
  for (int32_t a = 0; a < rank; a++) {
    int32_t from = swap_1_2 && (a == 1 || a == 2) ? 3 - a : a;
    t->shape[a] = shape[from];
    t->strides[a] = strides[from];
  }
}
