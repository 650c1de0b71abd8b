/* CPU work on the OpenMP threads that the process already has. PyTorch's operators run on these threads, which spin for a while between two
 * operators: threads of our own would compete with them for the cores. This file is neither compiled with OpenMP nor linked to it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "glue.h"

/* GCC compiles `omp parallel` to a call of this function. LLVM's and Intel's runtimes have it too. */
typedef void (*gomp_parallel)(void (*body)(void *), void *arg, unsigned threads, unsigned flags);

static gomp_parallel run_parallel;
static int (*largest_team)(void); /* omp_get_max_threads: the number that torch.set_num_threads has set for the calling thread */
static pid_t owner;               /* the process in which run_parallel was found */

/* Whether this process is a child of fork that has not called exec. In such a child, the runtime may wait for ever for threads that only
 * the parent has. */
static int is_forked(void) {
#ifdef __linux__
  enum { PF_FORKNOEXEC = 0x40 }; /* in field 9 of /proc/PID/stat; field 2 is in parentheses and may hold anything */
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
  *(void **)&largest_team = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
  if (largest_team) *(void **)&run_parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  owner = getpid();
}

static void *pass(void *gate) {
  pthread_mutex_lock(gate);
  pthread_mutex_unlock(gate);
  return NULL;
}

/* Whether the system can start `count` more threads that all exist at once. */
static int can_start(int count) {
  pthread_t *threads = malloc((size_t)count * sizeof *threads);
  if (!threads) return 0;
  pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&gate);
  int started = 0;
  while (started < count && pthread_create(&threads[started], NULL, pass, &gate) == 0) started++;
  pthread_mutex_unlock(&gate);
  for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
  free(threads);
  return started == count;
}

/* Whether this thread may lead a team of its largest size. The runtime ends the process if it cannot start a thread. So threads are started
 * as a test the first time, and whenever the team has grown. */
static int has_team(void) {
  static _Thread_local int started = 1, refused;
  const int team = largest_team();
  if (team > started && (team == refused || !can_start(team - 1))) {
    refused = team;
    return 0;
  }
  started = team;
  return 1;
}

struct region {
  void (*body)(void *arg, int32_t i);
  void *arg;
  int32_t n;
  atomic_int places; /* how many threads of the team may work */
  atomic_int next;   /* the next item; threads take items until none is left, because a team may have fewer threads than items */
};

static void work(void *arg) {
  struct region *r = arg;
  if (atomic_fetch_sub_explicit(&r->places, 1, memory_order_relaxed) <= 0) return;
  for (int i; (i = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed)) < r->n;) r->body(r->arg, i);
}

/* Runs n items on the whole team of PyTorch's operators (which 0 stands for), however small n is. A smaller team would end threads, and the
 * next team would start them again. */
static void on_openmp(void *pool, int32_t n, void (*body)(void *arg, int32_t i), void *arg) {
  struct region r = {body, arg, n, (int)(uintptr_t)pool, 0};
  run_parallel(work, &r, 0, 0);
}

void strobe_glue_execution(strobe_execution *e, int32_t threads) {
  memset(e, 0, sizeof *e);
  e->size = sizeof *e;
  e->threads = threads;
  if (run_parallel && threads > 1 && owner == getpid() && threads <= largest_team() && has_team()) {
    e->parallel = on_openmp;
    e->pool = (void *)(uintptr_t)threads;
  }
}
