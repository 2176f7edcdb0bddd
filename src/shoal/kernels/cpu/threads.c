/* How many threads a call uses, and the scratch memory that each thread keeps. Part of native.c. */

enum { WORTH_THREADS = 1 << 15 }; /* values; fewer are computed before a second thread wakes up */

static int threads_for(int threads, long values) { return values > WORTH_THREADS ? threads : 1; }

/* Computes pieces 0 to count - 1 of some work, each once, in any order, on up to `threads` threads, the caller among
 * them. Returns when all are done. */
typedef void Piece(void *work, long n);
__attribute__((unused)) static void share(int threads, long count, Piece *piece, void *work) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && count > 1)
  for (long n = 0; n < count; n++) piece(work, n);
}

/* Scratch memory of the calling thread. It only grows, because fresh memory costs a page fault every 4 KiB, and it is
 * not freed when the thread ends, because an engine's threads live as long as the engine. */
enum { SCRATCH_ROWS, SCRATCH_TILES, SCRATCH_PANELS, SCRATCHES };
static void *scratch_for(int use, size_t size) {
  static __thread struct {
    char *memory;
    size_t size;
  } held[SCRATCHES];
  if (size > held[use].size) {
    free(held[use].memory);
    held[use].size = (size + 0xffff) & ~(size_t)0xffff;
    held[use].memory = aligned_alloc(64, held[use].size);
    if (!held[use].memory) held[use].size = 0;
  }
  return held[use].memory;
}
