/* How many threads a call uses, and the scratch memory that each thread keeps. Part of native.c. */

enum { WORTH_THREADS = 1 << 13, WORTH_A_PIECE = 1 << 12 }; /* values; fewer are computed before another thread comes */

static int threads_for(int threads, long values) { return values > WORTH_THREADS ? threads : 1; }

/* some rows of an operation on single rows */
typedef void Rows(const void *work, long first, long count);

typedef struct {
  Rows *compute;
  const void *work;
  long rows, each;
} RowPieces;

static void row_piece(void *work, long n) {
  const RowPieces *p = work;
  long first = n * p->each;
  p->compute(p->work, first, p->rows - first < p->each ? p->rows - first : p->each);
}

/* all rows; values: in a row */
static void share_rows(int threads, long rows, long values, Rows *compute, const void *work) {
  RowPieces pieces = {compute, work, rows, WORTH_A_PIECE / (values + 1) + 1};
  share(threads_for(threads, rows * values), (rows + pieces.each - 1) / pieces.each, row_piece, &pieces);
}

/* Scratch memory of the calling thread. It only grows, because fresh memory costs a page fault every 4 KiB, and it is
 * not freed when the thread ends, because an engine's threads live as long as the engine. */
enum { SCRATCH_ROWS, SCRATCH_TILES, SCRATCH_PANELS, SCRATCH_DRAW, SCRATCHES };
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
