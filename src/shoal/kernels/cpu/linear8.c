/* Linear layers with 8-bit weights. Part of native.c.
 *
 * Weights are 8-bit integers with one scale per output, in the layout of linear.c; rows of x are rounded to 8-bit
 * integers with one scale per row first. Sums of integers are exact, so their order does not matter. `inputs` is padded
 * with zeros to a multiple of INT8_PAD. */

enum { INT8_PAD = 64 };

/* x86 multiplies unsigned bytes by signed ones: INT8_RAISE is added to every weight, and INT8_RAISE times the sum of a
 * row of x is subtracted at the end. */
#if defined(__AVX512VNNI__)
enum { INT8_STEP = 64, INT8_RAISE = 128 };
typedef __m512i bytes;
typedef __m512i counts;
INLINE bytes load_bytes(const int8_t *p) { return _mm512_loadu_si512(p); }
INLINE bytes load_weights(const int8_t *p) { return _mm512_xor_si512(load_bytes(p), _mm512_set1_epi8(-128)); }
INLINE counts add_products(counts sums, bytes x, bytes w) { return _mm512_dpbusd_epi32(sums, w, x); }
INLINE int32_t sum_counts(counts x) { return _mm512_reduce_add_epi32(x); }
#elif defined(__AVXVNNI__)
enum { INT8_STEP = 32, INT8_RAISE = 128 };
typedef __m256i bytes;
typedef __m256i counts;
INLINE bytes load_bytes(const int8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE bytes load_weights(const int8_t *p) { return _mm256_xor_si256(load_bytes(p), _mm256_set1_epi8(-128)); }
INLINE counts add_products(counts sums, bytes x, bytes w) { return _mm256_dpbusd_avx_epi32(sums, w, x); }
INLINE int32_t sum_counts(counts x) {
  int32_t v[8], total = 0;
  _mm256_storeu_si256((__m256i *)v, x);
  for (int i = 0; i < 8; i++) total += v[i];
  return total;
}
#elif defined(__ARM_FEATURE_DOTPROD)
enum { INT8_STEP = 16 };
typedef int8x16_t bytes;
typedef int32x4_t counts;
INLINE bytes load_bytes(const int8_t *p) { return vld1q_s8(p); }
INLINE counts add_products(counts sums, bytes a, bytes b) { return vdotq_s32(sums, a, b); }
INLINE int32_t sum_counts(counts x) { return vaddvq_s32(x); }
#elif defined(__AVX512BW__)
enum { INT8_STEP = 32 };
typedef __m512i bytes;
typedef __m512i counts;
INLINE bytes load_bytes(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
INLINE counts add_products(counts sums, bytes a, bytes b) { return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b)); }
INLINE int32_t sum_counts(counts x) { return _mm512_reduce_add_epi32(x); }
#elif defined(__AVX2__)
enum { INT8_STEP = 16 };
typedef __m256i bytes;
typedef __m256i counts;
INLINE bytes load_bytes(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
INLINE counts add_products(counts sums, bytes a, bytes b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
INLINE int32_t sum_counts(counts x) {
  int32_t v[8], total = 0;
  _mm256_storeu_si256((__m256i *)v, x);
  for (int i = 0; i < 8; i++) total += v[i];
  return total;
}
#else
enum { INT8_STEP = 16 };
typedef int16_t bytes __attribute__((vector_size(32)));
typedef int32_t counts __attribute__((vector_size(64)));
INLINE bytes load_bytes(const int8_t *p) {
  bytes wide;
  for (int i = 0; i < INT8_STEP; i++) wide[i] = p[i];
  return wide;
}
INLINE counts add_products(counts sums, bytes a, bytes b) {
  return sums + __builtin_convertvector(a, counts) * __builtin_convertvector(b, counts);
}
INLINE int32_t sum_counts(counts x) {
  int32_t total = 0;
  for (int i = 0; i < 16; i++) total += x[i];
  return total;
}
#endif

#if !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
enum { INT8_RAISE = 0 };
INLINE bytes load_weights(const int8_t *p) { return load_bytes(p); }
#endif

typedef struct {
  const int8_t *x, *weight;
  const float *x_scales, *scales;
  const int32_t *x_sums;
  const void *bias;
  const float *residual;
  float *out;
  long rows, inputs, outputs;
  int bias_type;
} Linear8;

INLINE void dots8(const Linear8 *t, const int8_t *const *x, const int8_t *const *w, int rows, int columns, long row,
                  const long *column, const char *soon, int pace) {
  counts sums[DOT_ROWS][DOT_COLUMNS];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) sums[i][j] = (counts){0};
  long k = 0;
#if HAS_ARM_TILES && defined(__ARM_FEATURE_DOTPROD)
  if (rows == DOT_ROWS && columns == DOT_COLUMNS) {
    k = t->inputs;
    ArmTile tile = arm_tile((const void *const *)x, (const void *const *)w, k / INT8_STEP, soon, pace);
    arm_dots8(sums, &tile);
  }
#endif
  for (; k < t->inputs; k += INT8_PAD) {
    for (int n = 0; n < pace; n++, soon += 64) __builtin_prefetch(soon);
#pragma GCC unroll 4
    for (int n = 0; n < INT8_PAD; n += INT8_STEP) {
      bytes left[DOT_ROWS];
#pragma GCC unroll 8
      for (int i = 0; i < rows; i++) left[i] = load_bytes(x[i] + k + n);
#pragma GCC unroll 8
      for (int j = 0; j < columns; j++) {
        bytes right = load_weights(w[j] + k + n);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) sums[i][j] = add_products(sums[i][j], left[i], right);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
      long index = (row + i) * t->outputs + column[j];
      int32_t count = sum_counts(sums[i][j]) - INT8_RAISE * t->x_sums[row + i];
      float value = (float)count * t->x_scales[row + i] * t->scales[column[j]];
      if (t->bias) value += load_any(t->bias, column[j], t->bias_type);
      if (t->residual) value += t->residual[index];
      t->out[index] = value;
    }
}

typedef void Dots8(const Linear8 *, const int8_t *const *, const int8_t *const *, long, const long *, const char *,
                   int);
#define DOTS8(rows, columns)                                                                                         \
  static void dots8_##rows##_##columns(const Linear8 *t, const int8_t *const *x, const int8_t *const *w, long row,   \
                                       const long *column, const char *soon, int pace) {                             \
    dots8(t, x, w, rows, columns, row, column, soon, pace);                                                          \
  }
DOTS8(1, 1) DOTS8(2, 1) DOTS8(3, 1) DOTS8(4, 1)
DOTS8(1, 2) DOTS8(2, 2) DOTS8(3, 2) DOTS8(4, 2)
DOTS8(1, DOT_COLUMNS) DOTS8(2, DOT_COLUMNS) DOTS8(3, DOT_COLUMNS) DOTS8(4, DOT_COLUMNS)
static Dots8 *const one_dots8[] = {dots8_1_1, dots8_2_1, dots8_3_1, dots8_4_1};
static Dots8 *const two_dots8[] = {dots8_1_2, dots8_2_2, dots8_3_2, dots8_4_2};
static Dots8 *const wide_dots8[] = {dots8_1_DOT_COLUMNS, dots8_2_DOT_COLUMNS, dots8_3_DOT_COLUMNS, dots8_4_DOT_COLUMNS};

static void few_rows8(const Linear8 *t, long first, long count) {
  const int8_t *x[DOT_ROWS], *w[2];
  long half = count / 2;
  for (long i = 0; i < t->rows; i++) x[i] = t->x + i * t->inputs;
  for (long step = 0; step < count - half; step++) {
    long column[2] = {first + half + step, first + step};
    for (int n = 0; n < 2; n++) w[n] = t->weight + column[n] * t->inputs;
    (step < half ? two_dots8 : one_dots8)[t->rows - 1](t, x, w, 0, column, NULL, 0);
  }
}

static void many_rows8(const Linear8 *t, long row, long rows, long first, long count) {
  int tiles = (int)((rows + DOT_ROWS - 1) / DOT_ROWS), pace = (DOT_COLUMNS + tiles - 1) / tiles;
  for (long j = first; j < first + count;) {
    int group = first + count - j >= DOT_COLUMNS ? DOT_COLUMNS : 1;
    const int8_t *w[DOT_COLUMNS], *x[DOT_ROWS];
    long column[DOT_COLUMNS];
    for (int n = 0; n < group; n++) column[n] = j + n, w[n] = t->weight + (j + n) * t->inputs;
    const char *soon = (const char *)w[0] + group * t->inputs;
    for (long i = 0; i < rows; i += DOT_ROWS) {
      int these = rows - i < DOT_ROWS ? (int)(rows - i) : DOT_ROWS;
      for (int n = 0; n < these; n++) x[n] = t->x + (row + i + n) * t->inputs;
      Dots8 *const *table = group > 1 ? wide_dots8 : one_dots8;
      table[(unsigned)(these - 1) % DOT_ROWS](t, x, w, row + i, column, soon, group > 1 ? pace : 0);
      soon += pace * t->inputs;
    }
    j += group;
  }
}

/* the pieces of a call: ranges of columns by blocks of rows */
typedef struct {
  Linear8 linear;
  long blocks, width;
} Linear8Pieces;

static void linear8_piece(void *work, long n) {
  const Linear8Pieces *p = work;
  const Linear8 *t = &p->linear;
  long row = n % p->blocks * LINE_BLOCK, first = n / p->blocks * p->width;
  long rows = t->rows - row < LINE_BLOCK ? t->rows - row : LINE_BLOCK;
  long count = t->outputs - first < p->width ? t->outputs - first : p->width;
  if (t->rows <= DOT_ROWS)
    few_rows8(t, first, count);
  else
    many_rows8(t, row, rows, first, count);
}

/* x, and where its rows go in 8 bits */
typedef struct {
  const float *x;
  float *steps;
  int32_t *totals;
  int8_t *small;
  long real, padded;
} Quantized;

static void quantize_rows(const void *work, long first, long count) {
  const Quantized *q = work;
  for (long r = first; r < first + count; r++)
    q->steps[r] = quantize_row(q->small + r * q->padded, q->totals + r, q->x + r * q->real, q->real, q->padded);
}

/* `x` has `real` inputs. Returns 0, or 1 if memory ran out. */
API int shoal_linear8(float *out, const float *x, const int8_t *weight, int tiled, const float *scales,
                      const void *bias, int bias_type, const float *residual, long rows, long real, long inputs,
                      long outputs, int threads) {
  if (rows < 1) return 0;
#if HAS_LANES && !HAS_TILES
  if (tiled) {
    LaneLinear lanes = {.weight = (const char *)weight, .row_bytes = inputs, .x = x, .scales = scales, .bias = bias,
                        .bias_type = bias_type, .residual = residual, .out = out, .rows = rows, .inputs = real,
                        .outputs = outputs, .type = INT8};
    return linear_lanes(&lanes, threads);
  }
#endif
#if HAS_TILES
  TiledLinear work = {.weight = (const char *)weight, .row_bytes = inputs, .x = x, .bias = bias,
                      .bias_type = bias_type, .residual = residual, .out = out, .rows = rows, .inputs = real,
                      .outputs = outputs, .tiled = tiled};
  return reserve_bytes(&work, scales) ? linear_tiled(&work, threads) : 1;
#endif
  float *steps = scratch_for(SCRATCH_ROWS, rows * (inputs + sizeof(float) + sizeof(int32_t)));
  if (!steps) return 1;
  (void)tiled;
  int32_t *totals = (int32_t *)(steps + rows);
  Quantized q = {x, steps, totals, (int8_t *)(totals + rows), real, inputs};
  share_rows(threads, rows, inputs, quantize_rows, &q);
  int few = rows <= DOT_ROWS;
  long width = outputs / (threads * (few ? 4 : 8)) / 12 * 12, most = few ? 768 : 192;
  width = width < 12 ? 12 : width > most ? most : width;
  Linear8Pieces pieces = {
      .linear = {q.small, weight, steps, scales, totals, bias, residual, out, rows, inputs, outputs, bias_type},
      .blocks = (rows + LINE_BLOCK - 1) / LINE_BLOCK, .width = width};
  share(threads, pieces.blocks * ((outputs + width - 1) / width), linear8_piece, &pieces);
  return 0;
}
