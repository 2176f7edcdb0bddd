/* The threads that compute: work is cut into pieces, and whichever thread is free takes the next one. Part of native.c.
 *
 * The calling thread computes too. A call ends when all pieces are done, not when all threads have come: on a busy
 * machine a thread that does not run costs nothing, unless it was stopped in the middle of a piece. Whoever waits spins
 * for a moment and then sleeps, so that other programs get the core, and the thread that is waited for may be one of
 * those that they hold up.
 *
 *     share ──► pieces: how many are left to take ──► threads take one at a time
 *       │                                                │
 *       └── returns when `unfinished` is 0 ◄─────────────┘
 *
 * There is one pool per process. If two threads call at the same time, the second one computes alone. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

/* Computes one piece of some work; n counts from 0. */
typedef void Piece(void *work, long n);

enum { MOST_WORKERS = 1023, WORKER_STACK = 8 << 20, SPINS_PER_LOOK = 64 };
enum { LEAST_SPIN_NS = 50000, MOST_SPIN_NS = 300000, MORE_SPIN_NS = 2000 };
#define PIECES_MASK 0xffffffffu /* the lower half of `open`: pieces left to take; the upper half: who may take them */

static struct {
  _Atomic uint64_t open __attribute__((aligned(64)));
  _Atomic long unfinished __attribute__((aligned(64)));
  Piece *piece __attribute__((aligned(64))); /* these three may be read by those who have taken a piece */
  void *work;
  long count;
  _Atomic int busy __attribute__((aligned(64))); /* a call is under way */
  _Atomic int sleepers, caller_sleeps;
  int workers; /* how many there are; changed only during a call */
  pthread_mutex_t lock;
  pthread_cond_t opened, finished;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .opened = PTHREAD_COND_INITIALIZER, .finished = PTHREAD_COND_INITIALIZER};

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory"); /* yield does nothing on most of these CPUs */
#endif
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* whether there is a piece that this worker may take */
INLINE int may_take(uint64_t open, long worker) { return (open & PIECES_MASK) && worker < (long)(open >> 32); }

/* What this thread does in the call under way. */
static __thread struct {
  int shares;         /* it takes pieces of the pool's call; else it computes all of a call by itself */
  long worker;        /* the caller is -1 */
  long ahead;         /* the piece that it has taken already, to compute next; -1: none */
  void (*leave)(void); /* done once, when no piece is left to it */
} mine = {.ahead = -1};

/* the next piece, which no other thread computes then; -1: none is left */
static long taken_piece(void) {
  uint64_t open = atomic_load(&pool.open);
  while (may_take(open, mine.worker))
    if (atomic_compare_exchange_weak(&pool.open, &open, open - 1)) return pool.count - (long)(open & PIECES_MASK);
  return -1;
}

/* The piece that this thread computes after piece n of a call, to prefetch its memory; -1: none is left. It is taken by
 * this, so ask late: a thread that is stopped then holds up two pieces. */
INLINE long piece_after(long n, long count) {
  if (!mine.shares) return n + 1 < count ? n + 1 : -1;
  if (mine.ahead < 0) mine.ahead = taken_piece();
  return mine.ahead;
}

static void leave_call(void) {
  if (mine.leave) mine.leave();
  mine.leave = NULL;
}

static void finish_pieces(long count) {
  if (atomic_fetch_sub(&pool.unfinished, count) > count || !atomic_load(&pool.caller_sleeps)) return;
  pthread_mutex_lock(&pool.lock);
  pthread_cond_signal(&pool.finished);
  pthread_mutex_unlock(&pool.lock);
}

/* computes pieces until none is left to take; the caller is worker -1 */
static void take_pieces(long worker) {
  long done = 0; /* until they are reported the call cannot end, so all are pieces of one call */
  mine.shares = 1, mine.worker = worker;
  for (long n; (n = mine.ahead >= 0 ? mine.ahead : taken_piece()) >= 0; done++) {
    mine.ahead = -1;
    pool.piece(pool.work, n);
  }
  leave_call();
  mine.shares = 0;
  if (done) finish_pieces(done);
}

/* Spins for a moment; returns whether what it waits for has come. Going to sleep and being woken costs more than most
 * waits take, but only while the other threads run: a spin in vain halves the next one, a short wait makes it longer.
 * So a thread spins for long on a quiet machine and hardly at all beside busy programs. */
static int spun(int (*come)(long), long worker) {
  static __thread int64_t patience = MOST_SPIN_NS;
  for (int64_t until = 0, now = 0; now <= until; now = now_ns()) {
    for (int n = 0; n < SPINS_PER_LOOK; n++) {
      if (come(worker)) {
        if (patience < MOST_SPIN_NS) patience += MORE_SPIN_NS;
        return 1;
      }
      relax();
    }
    if (!until) until = now_ns() + patience;
  }
  patience = patience / 2 > LEAST_SPIN_NS ? patience / 2 : LEAST_SPIN_NS;
  return 0;
}

static int has_opened(long worker) { return may_take(atomic_load(&pool.open), worker); }
static int has_finished(long worker) {
  (void)worker;
  return atomic_load(&pool.unfinished) == 0;
}

static void *work_forever(void *number) {
  long worker = (long)(intptr_t)number;
  for (;;) {
    if (!spun(has_opened, worker)) {
      pthread_mutex_lock(&pool.lock);
      atomic_fetch_add(&pool.sleepers, 1);
      while (!has_opened(worker)) pthread_cond_wait(&pool.opened, &pool.lock);
      atomic_fetch_sub(&pool.sleepers, 1);
      pthread_mutex_unlock(&pool.lock);
    }
    take_pieces(worker);
  }
  return NULL;
}

/* a forked process has none of the workers */
static void forget_workers(void) {
  pool.workers = 0;
  atomic_store(&pool.open, 0);
  atomic_store(&pool.unfinished, 0);
  atomic_store(&pool.busy, 0);
  atomic_store(&pool.sleepers, 0);
  atomic_store(&pool.caller_sleeps, 0);
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.opened, NULL), pthread_cond_init(&pool.finished, NULL);
}

/* Starts workers until there are so many. Returns how many there are: fewer if the system refuses. */
static int start_workers(int wanted) {
  static int forks_handled;
  if (!forks_handled) forks_handled = !pthread_atfork(NULL, NULL, forget_workers);
  pthread_attr_t attributes;
  sigset_t all_signals, before;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, WORKER_STACK);
  sigfillset(&all_signals); /* signals go to the other threads of the process */
  pthread_sigmask(SIG_SETMASK, &all_signals, &before);
  for (; pool.workers < wanted && pool.workers < MOST_WORKERS; pool.workers++) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, work_forever, (void *)(intptr_t)pool.workers)) break;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return pool.workers;
}

static void wait_until_finished(void) {
  if (spun(has_finished, -1)) return;
  pthread_mutex_lock(&pool.lock);
  atomic_store(&pool.caller_sleeps, 1);
  while (!has_finished(-1)) pthread_cond_wait(&pool.finished, &pool.lock);
  atomic_store(&pool.caller_sleeps, 0);
  pthread_mutex_unlock(&pool.lock);
}

/* Computes pieces 0 to count - 1 of some work, each once, in any order, on up to `threads` threads, the caller among
 * them. Returns when all are done. */
static void share(int threads, long count, Piece *piece, void *work) {
  int alone = threads < 2 || count < 2 || count > PIECES_MASK || atomic_exchange(&pool.busy, 1);
  if (alone) {
    for (long n = 0; n < count; n++) piece(work, n);
    leave_call();
    return;
  }
  uint64_t workers = threads - 1;
  if (pool.workers < threads - 1) start_workers(threads - 1);
  pool.piece = piece, pool.work = work, pool.count = count;
  atomic_store(&pool.unfinished, count);
  atomic_store(&pool.open, workers << 32 | (uint64_t)count);
  if (atomic_load(&pool.sleepers)) {
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.opened);
    pthread_mutex_unlock(&pool.lock);
  }
  take_pieces(-1);
  wait_until_finished();
  atomic_store(&pool.busy, 0);
}
