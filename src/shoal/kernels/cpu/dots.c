/* Dot products of float32 rows. Part of native.c.
 *
 * A tile of rows of x times rows of w, both contiguous: out[i, j] = x_i . w_j. Each sum runs over k in LANES lanes from
 * left to right, then the lanes are added, then the remainder of k: the same order for every tile size. */

INLINE void dot_step(floats sums[][DOT_COLUMNS], const float *const *x, const float *const *w, long at_k, int rows,
                     int columns) {
  floats left[DOT_ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++) left[i] = load(x[i] + at_k);
#pragma GCC unroll 8
  for (int j = 0; j < columns; j++) {
    floats right = load(w[j] + at_k);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) sums[i][j] = fused(left[i], right, sums[i][j]);
  }
}

/* adds the lanes of one sum, then the remainder of k from `rest` on */
INLINE float dot_end(floats lanes, const float *x, const void *w, int type, long rest, long k) {
  float found = sum(lanes);
  for (; rest < k; rest++) found = fused_one(x[rest], load_one(at(w, rest, type), type), found);
  return found;
}

INLINE void dots(const float *const *x, const float *const *w, long k, int rows, int columns, float *out,
                 long out_stride, const char *soon, int pace) {
  floats sums[DOT_ROWS][DOT_COLUMNS];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) sums[i][j] = all(0);
  long at_k = 0;
#if HAS_ARM_TILES
  if (rows == DOT_ROWS && columns == DOT_COLUMNS && k >= LANES) {
    ArmTile tile = arm_tile((const void *const *)x, (const void *const *)w, k / LANES, soon, pace);
    arm_dots(sums, &tile);
    at_k = k / LANES * LANES;
  }
#endif
  for (; at_k + LINE <= k; at_k += LINE) {
    for (int n = 0; n < pace; n++, soon += 64) __builtin_prefetch(soon);
#pragma GCC unroll 4
    for (long n = 0; n < LINE; n += LANES) dot_step(sums, x, w, at_k + n, rows, columns);
  }
  for (; at_k + LANES <= k; at_k += LANES) dot_step(sums, x, w, at_k, rows, columns);
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++) {
    float *to = out + i * out_stride;
    int j = 0;
#pragma GCC unroll 2
    for (; j + 4 <= columns; j += 4) sum4(to + j, sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
#pragma GCC unroll 4
    for (; j < columns; j++) to[j] = sum(sums[i][j]);
    for (; at_k < k && j > 0; j--) {
      float rest = to[j - 1];
      for (long n = at_k; n < k; n++) rest = fused_one(x[i][n], w[j - 1][n], rest);
      to[j - 1] = rest;
    }
  }
}

/* one function for every tile size, and tables of them */
typedef void Dots(const float *const *, const float *const *, long, float *, long, const char *, int);
#define DOTS(rows, columns)                                                                                        \
  static void dots_##rows##_##columns(const float *const *x, const float *const *w, long k, float *out,            \
                                      long out_stride, const char *soon, int pace) {                               \
    dots(x, w, k, rows, columns, out, out_stride, soon, pace);                                                     \
  }
DOTS(1, 1) DOTS(2, 1) DOTS(3, 1) DOTS(4, 1)
DOTS(1, DOT_COLUMNS) DOTS(2, DOT_COLUMNS) DOTS(3, DOT_COLUMNS) DOTS(4, DOT_COLUMNS)
static Dots *const narrow_dots[] = {dots_1_1, dots_2_1, dots_3_1, dots_4_1};
static Dots *const wide_dots[] = {dots_1_DOT_COLUMNS, dots_2_DOT_COLUMNS, dots_3_DOT_COLUMNS, dots_4_DOT_COLUMNS};

/* any number of rows of x times `count` rows of w; meanwhile prefetches from `soon` on, unless it is NULL */
static void dot_block(const float *x, long x_stride, long rows, const float *const *w, long count, long k, float *out,
                      long out_stride, const char *soon) {
  long tiles = (rows + DOT_ROWS - 1) / DOT_ROWS;
  int pace = soon ? (int)((DOT_COLUMNS + tiles - 1) / tiles) : 0;
  for (long j = 0; j < count;) {
    int columns = count - j >= DOT_COLUMNS ? DOT_COLUMNS : 1;
    for (long i = 0; i < rows; i += DOT_ROWS) {
      int these = rows - i < DOT_ROWS ? (int)(rows - i) : DOT_ROWS;
      const float *lines[DOT_ROWS];
      for (int n = 0; n < these; n++) lines[n] = x + (i + n) * x_stride;
      Dots *const *table = columns > 1 ? wide_dots : narrow_dots;
      table[these - 1](lines, w + j, k, out + i * out_stride + j, out_stride, soon, columns > 1 ? pace : 0);
      if (soon && columns > 1) soon += pace * 64 * (k / LINE);
    }
    j += columns;
  }
}
