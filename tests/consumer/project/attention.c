/* Attention through the C ABI in plain C99, against a double loop. */
#include <strobe/strobe.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { QUERIES = 5, KEYS = 9, DIM = 4 };

static strobe_tensor tensor(float *data, int64_t rows) {
  strobe_tensor t = {0};
  t.data = data;
  t.dtype = STROBE_FLOAT32;
  t.rank = 4;
  t.shape[0] = t.shape[1] = 1;
  t.shape[2] = rows;
  t.shape[3] = DIM;
  t.strides[2] = DIM;
  t.strides[3] = 1;
  return t;
}

int main(void) {
  float q[QUERIES * DIM], k[KEYS * DIM], v[KEYS * DIM], out[QUERIES * DIM];
  double worst = 0;
  int i, j, c;
  for (i = 0; i < QUERIES * DIM; i++) q[i] = (float)sin(0.7 * i);
  for (j = 0; j < KEYS * DIM; j++) k[j] = (float)sin(1.3 * j), v[j] = (float)sin(2.1 * j);

  strobe_tensor tq = tensor(q, QUERIES), tk = tensor(k, KEYS), tv = tensor(v, KEYS), tout = tensor(out, QUERIES);
  strobe_attention attention = {0};
  strobe_tensors tensors = {0};
  attention.size = sizeof attention;
  tensors.size = sizeof tensors;
  tensors.q = &tq;
  tensors.k = &tk;
  tensors.v = &tv;
  tensors.out = &tout;
  if (strobe_forward(&attention, &tensors, NULL) != STROBE_OK) {
    fprintf(stderr, "%s\n", strobe_last_error());
    return 1;
  }
  attention.softcap = -1;
  if (strobe_forward(&attention, &tensors, NULL) != STROBE_INVALID_ARGUMENT || strobe_last_refusal(1) != NULL) return 1;
  {
    const strobe_refusal *refusal = strobe_last_refusal(0);
    if (strcmp(refusal->argument, "softcap") != 0 || refusal->code != STROBE_CODE_VALUE || refusal->values[0]->number != -1) return 1;
  }

  for (i = 0; i < QUERIES; i++) {
    double expected[DIM] = {0}, sum = 0;
    for (j = 0; j < KEYS; j++) {
      double s = 0, p;
      for (c = 0; c < DIM; c++) s += (double)q[i * DIM + c] * k[j * DIM + c];
      p = exp(s / sqrt(DIM));
      sum += p;
      for (c = 0; c < DIM; c++) expected[c] += p * v[j * DIM + c];
    }
    for (c = 0; c < DIM; c++) worst = fmax(worst, fabs(out[i * DIM + c] - expected[c] / sum));
  }
  printf("strobe %s: differs by at most %.2g\n", strobe_version(), worst);
  return worst < 1e-6 ? 0 : 1;
}
