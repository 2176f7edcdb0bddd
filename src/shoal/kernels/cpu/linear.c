/* Linear layers. Part of native.c.
 *
 * CPUs with bfloat16 products use tiles.c or pairs.c for that type; this file serves all other types and machines.
 * Weights are in torch's layout, [outputs, inputs], and are read from memory once. A task is a range of their rows. Up
 * to DOT_ROWS rows of x: two long streams of weights, which gives the highest memory bandwidth. More rows: weights in
 * groups of DOT_COLUMNS, which stay in the L1 cache while all rows of x are multiplied and the next group is
 * prefetched; 16-bit weights are widened once per group. */

enum { LINE_BLOCK = 32 };

/* a weight and its bias, as callers describe them; structs.py mirrors it */
typedef struct {
  const void *weight, *bias;
  const void *scales, *offsets; /* of INT8: float32 for each output; of blocks: linear_blocks.c */
  long inputs, padded, outputs; /* padded: inputs of INT8, with padding */
  long group;                   /* of blocks: inputs that share an offset */
  int type, bias_type, tiled;   /* tiled: in tiles */
  int scale_type, offset_type;  /* of blocks */
} Matrix;

typedef struct {
  const float *x;
  const void *weight;
  const void *bias;      /* or NULL */
  const float *residual; /* or NULL; may be out */
  float *out;
  long rows, inputs, outputs;
  int type, bias_type;
} Linear;

static void store_result(const Linear *t, long row, long column, float value) {
  long index = row * t->outputs + column;
  if (t->bias) value += load_any(t->bias, column, t->bias_type);
  if (t->residual) value += t->residual[index];
  t->out[index] = value;
}

/* the same for [rows, count] values; without a bias, as in most layers, a row is stored at once */
static void store_results(const Linear *t, long row, long rows, long column, int count, const float *values) {
  for (long i = 0; i < rows; i++, values += count) {
    long index = (row + i) * t->outputs + column;
    if (t->bias || count != DOT_COLUMNS)
      for (int n = 0; n < count; n++) store_result(t, row + i, column + n, values[n]);
    else if (t->residual)
      for (int n = 0; n < DOT_COLUMNS; n++) t->out[index + n] = values[n] + t->residual[index + n];
    else
      memcpy(t->out + index, values, sizeof(float) * DOT_COLUMNS);
  }
}

INLINE void two_streams(const Linear *t, int type, int rows, long first, long count) {
  long k = t->inputs, half = count / 2;
  for (long step = 0; step < count - half; step++) {
    long columns[2] = {first + half + step, first + step}; /* an odd count makes the first stream one row longer */
    int streams = step < half ? 2 : 1;
    const void *w[2] = {at(t->weight, columns[0] * k, type), at(t->weight, columns[1] * k, type)};
    floats sums[DOT_ROWS][2];
    for (int i = 0; i < rows; i++) sums[i][0] = sums[i][1] = all(0);
    long at_k = 0;
    for (; at_k + LINE <= k; at_k += LINE) {
      floats right[2][LINE / LANES];
      load_line(right[0], at(w[0], at_k, type), type);
      load_line(right[1], at(w[1], at_k, type), type);
#pragma GCC unroll 4
      for (int n = 0; n < LINE / LANES; n++)
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
          floats left = load(t->x + i * k + at_k + n * LANES);
          sums[i][0] = fused(left, right[0][n], sums[i][0]);
          sums[i][1] = fused(left, right[1][n], sums[i][1]);
        }
    }
    for (; at_k + LANES <= k; at_k += LANES)
#pragma GCC unroll 4
      for (int i = 0; i < rows; i++) {
        floats left = load(t->x + i * k + at_k);
        sums[i][0] = fused(left, load_as(at(w[0], at_k, type), type), sums[i][0]);
        sums[i][1] = fused(left, load_as(at(w[1], at_k, type), type), sums[i][1]);
      }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
      for (int n = 0; n < streams; n++)
        store_result(t, i, columns[n], dot_end(sums[i][n], t->x + i * k, w[n], type, at_k, k));
  }
}

/* one function for every type and number of rows */
typedef void Streams(const Linear *, long, long);
#define STREAMS(type, rows)                                                      \
  static void streams_##type##_##rows(const Linear *t, long first, long count) { \
    two_streams(t, type, rows, first, count);                                    \
  }
STREAMS(FLOAT32, 1) STREAMS(FLOAT32, 2) STREAMS(FLOAT32, 3) STREAMS(FLOAT32, 4)
STREAMS(BFLOAT16, 1) STREAMS(BFLOAT16, 2) STREAMS(BFLOAT16, 3) STREAMS(BFLOAT16, 4)
STREAMS(FLOAT16, 1) STREAMS(FLOAT16, 2) STREAMS(FLOAT16, 3) STREAMS(FLOAT16, 4)
static Streams *const streams[][DOT_ROWS] = {
    {streams_FLOAT32_1, streams_FLOAT32_2, streams_FLOAT32_3, streams_FLOAT32_4},
    {streams_BFLOAT16_1, streams_BFLOAT16_2, streams_BFLOAT16_3, streams_BFLOAT16_4},
    {streams_FLOAT16_1, streams_FLOAT16_2, streams_FLOAT16_3, streams_FLOAT16_4},
};

static void many_rows(const Linear *t, long row, long rows, long first, long count, float *wide) {
  long k = t->inputs;
  for (long j = first; j < first + count;) {
    int group = first + count - j >= DOT_COLUMNS ? DOT_COLUMNS : 1;
    const float *w[DOT_COLUMNS];
    float found[LINE_BLOCK * DOT_COLUMNS];
    for (int n = 0; n < group; n++) w[n] = widened(at(t->weight, (j + n) * k, t->type), t->type, k, wide + n * k);
    const char *soon = at(t->weight, (j + group) * k, t->type);
    dot_block(t->x + row * k, k, rows, w, group, k, found, group, soon);
    store_results(t, row, rows, j, group, found);
    j += group;
  }
}

/* the pieces of a call: ranges of columns by blocks of rows */
typedef struct {
  Linear linear;
  long blocks, width;
  _Atomic int failed;
} LinearPieces;

static void linear_piece(void *work, long n) {
  LinearPieces *p = work;
  const Linear *t = &p->linear;
  long row = n % p->blocks * LINE_BLOCK, first = n / p->blocks * p->width;
  long rows = t->rows - row < LINE_BLOCK ? t->rows - row : LINE_BLOCK;
  long count = t->outputs - first < p->width ? t->outputs - first : p->width;
  if (t->rows <= DOT_ROWS) {
    streams[t->type][t->rows - 1](t, first, count);
    return;
  }
  float *wide = t->type == FLOAT32 ? NULL : scratch_for(SCRATCH_PANELS, sizeof(float) * DOT_COLUMNS * t->inputs);
  if (t->type != FLOAT32 && !wide)
    p->failed = 1;
  else
    many_rows(t, row, rows, first, count, wide);
}

/* Returns 0, or 1 if memory ran out. */
API int shoal_linear(float *out, const float *x, const void *weight, int type, int tiled, const void *bias,
                     int bias_type, const float *residual, long rows, long inputs, long outputs, int threads) {
  if (rows < 1) return 0;
#if HAS_LANES
  if (tiled && has_lanes(type)) {
    LaneLinear lanes = {.weight = weight, .row_bytes = inputs * (long)size_of(type), .x = x, .bias = bias,
                        .bias_type = bias_type, .residual = residual, .out = out, .rows = rows, .inputs = inputs,
                        .outputs = outputs, .type = type};
    return linear_lanes(&lanes, threads);
  }
#endif
#if HAS_TILES
  TiledLinear work = {.weight = weight, .row_bytes = inputs * 2, .x = x, .bias = bias, .bias_type = bias_type,
                      .residual = residual, .out = out, .rows = rows, .inputs = inputs, .outputs = outputs,
                      .tiled = tiled};
  if (type == BFLOAT16) return linear_tiled(&work, threads);
#elif HAS_PAIRS
  if (type == BFLOAT16) return linear_paired(out, x, weight, bias, bias_type, residual, rows, inputs, outputs, threads);
#endif
  (void)tiled;
  int few = rows <= DOT_ROWS;
  long width = outputs / (threads * (few ? 4 : 8)) / 12 * 12, most = few ? 384 : 96;
  width = width < 12 ? 12 : width > most ? most : width;
  LinearPieces pieces = {.linear = {x, weight, bias, residual, out, rows, inputs, outputs, type, bias_type},
                         .blocks = (rows + LINE_BLOCK - 1) / LINE_BLOCK, .width = width};
  share(threads, pieces.blocks * ((outputs + width - 1) / width), linear_piece, &pieces);
  return pieces.failed;
}
