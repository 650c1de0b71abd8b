/* CPU work on the OpenMP threads that the process has already. PyTorch's operators run on them, and they spin for a while between two
 * operators: threads of our own would compete with them for the cores. Nothing here is compiled with OpenMP or linked to it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "glue.h"

/* The entry point that GCC compiles `omp parallel` to; LLVM's and Intel's runtimes have it too. */
typedef void (*gomp_parallel)(void (*body)(void *), void *arg, unsigned threads, unsigned flags);

static gomp_parallel run_parallel;
static pid_t owner; /* the process in which run_parallel was found */

/* A child of fork that has not called exec: the runtime may remember threads that only the parent has, and wait for them for ever. */
static int is_forked(void) {
#ifdef __linux__
  enum { PF_FORKNOEXEC = 0x40 }; /* field 9 of /proc/PID/stat; field 2 is in parentheses and may hold anything */
  char text[1024];
  FILE *stat = fopen("/proc/self/stat", "r");
  size_t length = stat ? fread(text, 1, sizeof text - 1, stat) : 0;
  if (stat) fclose(stat);
  text[length] = 0;
  const char *fields = strrchr(text, ')');
  unsigned flags;
  return !fields || sscanf(fields + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1 || (flags & PF_FORKNOEXEC);
#else
  return 0;
#endif
}

void strobe_glue_find_openmp(void) {
  if (run_parallel || is_forked()) return;
  *(void **)&run_parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  owner = getpid();
}

struct region {
  void (*body)(void *arg, int32_t i);
  void *arg;
  int32_t n;
  atomic_int next; /* the team may be smaller than asked for: whoever is there takes what is left */
};

static void work(void *arg) {
  struct region *r = arg;
  for (int i; (i = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed)) < r->n;) r->body(r->arg, i);
}

/* Always a team of all threads, however small n: a team that shrinks ends threads, and the next one would start them again. */
static void on_openmp(void *pool, int32_t n, void (*body)(void *arg, int32_t i), void *arg) {
  struct region r = {body, arg, n, 0};
  run_parallel(work, &r, (unsigned)(uintptr_t)pool, 0);
}

void strobe_glue_execution(strobe_execution *e, int32_t threads) {
  memset(e, 0, sizeof *e);
  e->size = sizeof *e;
  e->threads = threads;
  if (run_parallel && threads > 1 && owner == getpid()) {
    e->parallel = on_openmp;
    e->pool = (void *)(uintptr_t)threads;
  }
}
