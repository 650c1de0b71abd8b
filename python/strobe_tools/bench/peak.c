/* The peak rate of one core: independent multiply-adds in registers and nothing else. `strobe bench` compiles this file with the system's
 * compiler for the present machine. Each function runs for about `seconds` on the calling thread, and returns FLOP per second of that
 * thread's CPU time, or 0 if the CPU lacks the instructions. */
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { CHAINS = 12, ROUNDS = 1 << 16 }; /* CHAINS exceeds latency times throughput, and fits 16 registers */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

#define UNROLLED _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++)

/* Defines a function that repeats STEP, an update of x. */
#define PEAK(NAME, VECTOR, INPUT, STEP, FLOPS)                                                                                             \
  double NAME(double seconds) {                                                                                                            \
    volatile float start_value = 0; /* opaque, else the compiler sees that all chains are the same */                                      \
    VECTOR acc[CHAINS];                                                                                                                    \
    UNROLLED acc[i] = (VECTOR){0} + start_value;                                                                                           \
    INPUT;                                                                                                                                 \
    double start = now(), elapsed, rounds = 0;                                                                                             \
    do {                                                                                                                                   \
      for (int r = 0; r < ROUNDS; r++) UNROLLED {                                                                                          \
          VECTOR x = acc[i];                                                                                                               \
          acc[i] = STEP;                                                                                                                   \
        }                                                                                                                                  \
      rounds += ROUNDS;                                                                                                                    \
      elapsed = now() - start;                                                                                                             \
    } while (elapsed < seconds);                                                                                                           \
    volatile VECTOR sink; /* keeps the work */                                                                                             \
    UNROLLED sink = acc[i];                                                                                                                \
    (void)sink;                                                                                                                            \
    return rounds * CHAINS * (FLOPS) / elapsed;                                                                                            \
  }

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float floats __attribute__((vector_size(4 * LANES)));

PEAK(peak_fma, floats, floats a = {0}; a += 0.999f, x *a + a, 2 * LANES)

/* Dot products of pairs of bf16. */
#if defined(__AVX512BF16__)
PEAK(peak_dot, __m512, __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.1f), _mm512_set1_ps(0.1f)), _mm512_dpbf16_ps(x, a, a), 4 * 16)
#else
double peak_dot(double seconds) { return 0 * seconds; }
#endif

/* Products of tiles of bf16, 16 x 32 by 32 x 16. */
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

double peak_tile(double seconds) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) != 0) return 0;
  struct {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
  } __attribute__((packed)) config = {.palette = 1};
  for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = 16;
  _tile_loadconfig(&config);
  double start = now(), elapsed, rounds = 0;
  do {
    for (int r = 0; r < ROUNDS / 16; r++) {
      _tile_dpbf16ps(0, 6, 7);
      _tile_dpbf16ps(1, 6, 7);
      _tile_dpbf16ps(2, 6, 7);
      _tile_dpbf16ps(3, 6, 7);
    }
    rounds += ROUNDS / 16;
    elapsed = now() - start;
  } while (elapsed < seconds);
  _tile_release();
  return rounds * 4 * (2 * 16 * 32 * 16) / elapsed;
}
#else
double peak_tile(double seconds) { return 0 * seconds; }
#endif
