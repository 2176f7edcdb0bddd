/* Linear layers with bfloat16 dot products (AVX-512, Arm). Part of native.c.
 *
 * The instruction multiplies pairs of neighbours and adds both products to a float32 lane. Rows of x are rounded to
 * bfloat16 once. Weights are read in torch's layout: for up to PAIR_ROWS rows of x in two long streams, for more rows
 * in groups that stay in the L1 cache. Every sum runs from left to right in LANES lanes, then the lanes are added: the
 * same for every tile size. The instructions flush denormals to 0, whatever mode the process has set.
 *
 * SHOAL_PRETEND_PAIRS computes the products in plain C, for tests on machines without the instructions. */

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define HAS_PAIRS 1
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS 1
#elif defined(SHOAL_PRETEND_PAIRS)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

#if HAS_PAIRS

enum { PAIR_ROWS = 4, PAIR_COLUMNS = LANES == 8 ? 3 : 6, PAIR_STEP = 2 * LANES };

typedef uint16_t pairs __attribute__((vector_size(LANES * 4)));
typedef pairs loose_pairs __attribute__((aligned(2), may_alias));

INLINE floats add_pairs(floats sums, pairs a, pairs b) {
#if defined(__AVX512BF16__)
  return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (floats)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  sums += (floats)((words)a & 0xffff0000) * (floats)((words)b & 0xffff0000);
  return sums + (floats)((words)a << 16) * (floats)((words)b << 16);
#endif
}

INLINE pairs load_pairs(const uint16_t *p) { return *(const loose_pairs *)p; }

/* the last ones, padded with zeros */
INLINE pairs load_some_pairs(const uint16_t *p, long count) {
  uint16_t some[PAIR_STEP] = {0};
  memcpy(some, p, count * 2);
  return load_pairs(some);
}

typedef struct {
  const uint16_t *x; /* [rows, padded] */
  const uint16_t *weight;
  const void *bias;
  const float *residual;
  float *out;
  long rows, inputs, padded, outputs;
  int bias_type;
} Paired;

INLINE void pair_end(const Paired *t, float value, long row, long column) {
  long index = row * t->outputs + column;
  if (t->bias) value += load_any(t->bias, column, t->bias_type);
  if (t->residual) value += t->residual[index];
  t->out[index] = value;
}

INLINE void pair_dots(const Paired *t, long row, const long *column, int rows, int columns, const char *soon,
                      int pace) {
  floats sums[PAIR_ROWS][PAIR_COLUMNS];
  const uint16_t *x[PAIR_ROWS], *w[PAIR_COLUMNS];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++) x[i] = t->x + (row + i) * t->padded;
#pragma GCC unroll 8
  for (int j = 0; j < columns; j++) w[j] = t->weight + column[j] * t->inputs;
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) sums[i][j] = all(0);
  long k = 0, fetched = 0;
  for (; k + PAIR_STEP <= t->inputs; k += PAIR_STEP) {
    for (; pace && fetched < k * pace * 2; fetched += 64) __builtin_prefetch(soon + fetched);
    pairs left[PAIR_ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) left[i] = load_pairs(x[i] + k);
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
      pairs right = load_pairs(w[j] + k);
#pragma GCC unroll 8
      for (int i = 0; i < rows; i++) sums[i][j] = add_pairs(sums[i][j], left[i], right);
    }
  }
  if (k < t->inputs)
    for (int j = 0; j < columns; j++) {
      pairs right = load_some_pairs(w[j] + k, t->inputs - k);
      for (int i = 0; i < rows; i++) sums[i][j] = add_pairs(sums[i][j], load_pairs(x[i] + k), right);
    }
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) pair_end(t, sum(sums[i][j]), row + i, column[j]);
}

typedef void PairDots(const Paired *, long, const long *, const char *, int);
#define PAIR_DOTS(rows, columns)                                                                            \
  static void pair_dots_##rows##_##columns(const Paired *t, long row, const long *column, const char *soon, \
                                           int pace) {                                                      \
    pair_dots(t, row, column, rows, columns, soon, pace);                                                   \
  }
PAIR_DOTS(1, 1) PAIR_DOTS(2, 1) PAIR_DOTS(3, 1) PAIR_DOTS(4, 1)
PAIR_DOTS(1, 2) PAIR_DOTS(2, 2) PAIR_DOTS(3, 2) PAIR_DOTS(4, 2)
PAIR_DOTS(1, PAIR_COLUMNS) PAIR_DOTS(2, PAIR_COLUMNS) PAIR_DOTS(3, PAIR_COLUMNS) PAIR_DOTS(4, PAIR_COLUMNS)
static PairDots *const one_pair_dots[] = {pair_dots_1_1, pair_dots_2_1, pair_dots_3_1, pair_dots_4_1};
static PairDots *const two_pair_dots[] = {pair_dots_1_2, pair_dots_2_2, pair_dots_3_2, pair_dots_4_2};
static PairDots *const wide_pair_dots[] = {pair_dots_1_PAIR_COLUMNS, pair_dots_2_PAIR_COLUMNS,
                                           pair_dots_3_PAIR_COLUMNS, pair_dots_4_PAIR_COLUMNS};

static void few_rows16(const Paired *t, long first, long count) {
  long half = count / 2;
  for (long step = 0; step < count - half; step++) {
    long column[2] = {first + half + step, first + step}; /* an odd count makes the first stream one row longer */
    if (step < half)
      two_pair_dots[t->rows - 1](t, 0, column, NULL, 0);
    else
      one_pair_dots[t->rows - 1](t, 0, column, NULL, 0);
  }
}

static void many_rows16(const Paired *t, long row, long rows, long first, long count) {
  long tiles = (rows + PAIR_ROWS - 1) / PAIR_ROWS;
  int pace = (int)((PAIR_COLUMNS + tiles - 1) / tiles);
  for (long j = first; j < first + count;) {
    int group = first + count - j >= PAIR_COLUMNS ? PAIR_COLUMNS : 1;
    long column[PAIR_COLUMNS];
    for (int n = 0; n < group; n++) column[n] = j + n;
    const char *soon = (const char *)(t->weight + (j + group) * t->inputs);
    for (long i = 0; i < rows; i += PAIR_ROWS, soon += pace * t->inputs * 2) {
      int these = rows - i < PAIR_ROWS ? (int)(rows - i) : PAIR_ROWS;
      PairDots *const *table = group > 1 ? wide_pair_dots : one_pair_dots;
      table[(unsigned)(these - 1) % PAIR_ROWS](t, row + i, column, soon, group > 1 ? pace : 0);
    }
    j += group;
  }
}

static void round_row(uint16_t *to, const float *from, long n, long padded) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) store_as(to + i, load(from + i), BFLOAT16);
  for (; i < n; i++) store_one(to + i, from[i], BFLOAT16);
  for (; i < padded; i++) to[i] = 0;
}

enum { ROWS_PER_PIECE = 64 };

/* the pieces of a call: ranges of columns by blocks of rows */
typedef struct {
  Paired linear;
  long blocks, width;
} PairedPieces;

static void paired_piece(void *work, long n) {
  const PairedPieces *p = work;
  const Paired *t = &p->linear;
  long row = n % p->blocks * ROWS_PER_PIECE, first = n / p->blocks * p->width;
  long count = t->outputs - first < p->width ? t->outputs - first : p->width;
  if (t->rows <= PAIR_ROWS)
    few_rows16(t, first, count);
  else
    many_rows16(t, row, t->rows - row < ROWS_PER_PIECE ? t->rows - row : ROWS_PER_PIECE, first, count);
}

/* x, and where its rows go in 16 bits */
typedef struct {
  const float *x;
  uint16_t *rounded;
  long inputs, padded;
} Rounded;

static void round_rows(const void *work, long first, long count) {
  const Rounded *r = work;
  for (long n = first; n < first + count; n++)
    round_row(r->rounded + n * r->padded, r->x + n * r->inputs, r->inputs, r->padded);
}

/* Returns 0, or 1 if memory ran out. Unused on CPUs with tiles. */
__attribute__((unused)) static int linear_paired(float *out, const float *x, const void *weight, const void *bias,
                                                 int bias_type, const float *residual, long rows, long inputs,
                                                 long outputs, int threads) {
  long padded = (inputs + PAIR_STEP - 1) / PAIR_STEP * PAIR_STEP;
  uint16_t *rounded = scratch_for(SCRATCH_ROWS, sizeof(uint16_t) * rows * padded);
  if (!rounded) return 1;
  Rounded r = {x, rounded, inputs, padded};
  share_rows(threads, rows, inputs, round_rows, &r);
  int few = rows <= PAIR_ROWS;
  long width = outputs / (threads * (few ? 4 : 8)) / 12 * 12, most = few ? 384 : 96;
  width = width < 12 ? 12 : width > most ? most : width;
  PairedPieces pieces = {.linear = {rounded, weight, bias, residual, out, rows, inputs, padded, outputs, bias_type},
                         .blocks = (rows + ROWS_PER_PIECE - 1) / ROWS_PER_PIECE, .width = width};
  share(threads, pieces.blocks * ((outputs + width - 1) / width), paired_piece, &pieces);
  return 0;
}
#endif
