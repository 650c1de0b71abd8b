/* A program of version 0.1, with the header of that version, on today's library: forward, plan, backward and a prepared call, compared with
 * loops. It knows no field that came later. */
#include <strobe/strobe.h>

#include <math.h>
#include <stdio.h>

#if STROBE_VERSION_MAJOR != 0 || STROBE_VERSION_MINOR != 1
#error "this is not the header of version 0.1"
#endif

enum { QUERIES = 5, KEYS = 9, DIM = 4 };

static strobe_tensor tensor(float *data, int32_t rank, int64_t rows) {
  strobe_tensor t = {0};
  t.data = data;
  t.dtype = STROBE_FLOAT32;
  t.rank = rank;
  t.shape[0] = t.shape[1] = 1;
  t.shape[2] = rows;
  t.shape[3] = DIM;
  t.strides[2] = rank == 4 ? DIM : 1;
  t.strides[3] = 1;
  return t;
}

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, strobe_last_error());
  return 1;
}

/* Causal attention: out, and the gradient of sum(out * dout) with respect to v. */
static void plain(const float *q, const float *k, const float *v, const float *dout, double *out, double *dv) {
  int i, j, c;
  for (i = 0; i < QUERIES * DIM; i++) out[i] = 0;
  for (j = 0; j < KEYS * DIM; j++) dv[j] = 0;
  for (i = 0; i < QUERIES; i++) {
    double p[KEYS], sum = 0;
    const int visible = i + KEYS - QUERIES + 1;
    for (j = 0; j < visible; j++) {
      double s = 0;
      for (c = 0; c < DIM; c++) s += (double)q[i * DIM + c] * k[j * DIM + c];
      sum += p[j] = exp(s / sqrt(DIM));
    }
    for (j = 0; j < visible; j++)
      for (c = 0; c < DIM; c++) {
        out[i * DIM + c] += p[j] / sum * v[j * DIM + c];
        dv[j * DIM + c] += p[j] / sum * dout[i * DIM + c];
      }
  }
}

static double worst(const float *x, const double *expected, int count) {
  double most = 0;
  for (int i = 0; i < count; i++) most = fmax(most, fabs(x[i] - expected[i]));
  return most;
}

int main(void) {
  float q[QUERIES * DIM], k[KEYS * DIM], v[KEYS * DIM], other_v[KEYS * DIM], dout[QUERIES * DIM];
  float out[QUERIES * DIM], other_out[QUERIES * DIM], lse[QUERIES], dv[KEYS * DIM];
  double expected[QUERIES * DIM], expected_dv[KEYS * DIM], off, off_dv, off_prepared;
  int i;
  for (i = 0; i < QUERIES * DIM; i++) q[i] = (float)sin(0.7 * i), dout[i] = (float)sin(0.3 * i);
  for (i = 0; i < KEYS * DIM; i++) k[i] = (float)sin(1.3 * i), v[i] = (float)sin(2.1 * i), other_v[i] = (float)sin(1.7 * i);

  strobe_tensor tq = tensor(q, 4, QUERIES), tk = tensor(k, 4, KEYS), tv = tensor(v, 4, KEYS), tout = tensor(out, 4, QUERIES),
                tlse = tensor(lse, 3, QUERIES), tdout = tensor(dout, 4, QUERIES), tdv = tensor(dv, 4, KEYS);
  strobe_attention attention = {0};
  strobe_tensors tensors = {0};
  strobe_execution execution = {0};
  attention.size = sizeof attention;
  tensors.size = sizeof tensors;
  execution.size = sizeof execution;
  attention.causal = 1;
  execution.threads = 2;
  tensors.q = &tq;
  tensors.k = &tk;
  tensors.v = &tv;
  tensors.out = &tout;
  tensors.lse = &tlse;
  if (strobe_forward(&attention, &tensors, &execution) != STROBE_OK) return failed("forward");

  struct {
    strobe_plan plan;
    uint64_t behind; /* no version may write here */
  } planned = {{0}, 0x1234};
  planned.plan.size = sizeof planned.plan;
  if (strobe_make_plan(&attention, &tensors, &execution, STROBE_FORWARD, &planned.plan) != STROBE_OK) return failed("plan");
  if (!planned.plan.engine || planned.plan.tile_k < 1 || planned.behind != 0x1234) return failed("plan's fields");

  strobe_prepared *prepared;
  strobe_addresses addresses = {0};
  if (strobe_prepare(&attention, &tensors, &execution, STROBE_FORWARD, &prepared) != STROBE_OK) return failed("prepare");
  addresses.size = sizeof addresses;
  addresses.q = q;
  addresses.k = k;
  addresses.v = other_v;
  addresses.out = other_out;
  addresses.lse = lse;
  if (strobe_run(prepared, &addresses, NULL) != STROBE_OK) return failed("run");
  strobe_release(prepared);

  tensors.dout = &tdout;
  tensors.dv = &tdv;
  if (strobe_backward(&attention, &tensors, &execution) != STROBE_OK) return failed("backward");

  plain(q, k, other_v, dout, expected, expected_dv);
  off_prepared = worst(other_out, expected, QUERIES * DIM);
  plain(q, k, v, dout, expected, expected_dv);
  off = worst(out, expected, QUERIES * DIM);
  off_dv = worst(dv, expected_dv, KEYS * DIM);
  printf("version 0.1 on %s, %s: out is off by %.2g, a prepared call's by %.2g, dv by %.2g\n", strobe_version(), planned.plan.engine, off,
         off_prepared, off_dv);
  return off < 1e-6 && off_prepared < 1e-6 && off_dv < 5e-6 ? 0 : 1;
}
