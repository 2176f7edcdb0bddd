/* Linear layers over tiled weights with vector instructions (AVX-512, AVX2): float32, bfloat16, 8 bits. Part of
 * native.c.
 *
 * A line of a tile is 64 bytes: four bytes of each of 16 outputs. So lane n of a vector belongs to output n, and inputs
 * are broadcast to all lanes. A panel is 16 outputs: its lines, one behind the other, from the first input to the last.
 *
 *     line       float32: 1 input     bfloat16: 2 inputs, widened exactly; x stays float32     int8: 4 inputs
 *     block      some rows of x by some panels: their sums stay in registers while k runs over all inputs
 *     slice      some lines of a unit: all blocks of rows are multiplied by them, while the next slice is prefetched;
 *                for many rows, bfloat16 is widened once for all blocks
 *     unit       panels that are read once and multiplied by a chunk of rows, slice by slice
 *     piece      some units by a chunk of rows: what a thread takes at a time
 *
 * Rows of x are first made ready: normed, rounded to 8 bits or to bfloat16 where that is what is multiplied, and copied
 * in segments of SEGMENT words, whose rows are a constant distance apart, so that they compete for no cache set.
 *
 * Every sum runs over the inputs from left to right in one lane: the same for every block size.
 *
 * SHOAL_PRETEND_TILES and SHOAL_PRETEND_PAIRS compile this file for any CPU, beside the code that they are for. */

#if defined(__AVX2__) || defined(SHOAL_PRETEND_TILES) || defined(SHOAL_PRETEND_PAIRS)
#define HAS_LANES 1
#else
#define HAS_LANES 0
#endif

/* whether tiled weights of a type are multiplied here; a CPU with tiles multiplies its two types in tiles.c */
static int has_lanes(int type) { return HAS_LANES && (type == FLOAT32 || (!HAS_TILES && type != FLOAT16)); }

#if HAS_LANES

enum { LINE_PARTS = LINE / LANES, SEGMENT = 256, SEGMENT_STRIDE = SEGMENT + 16 }; /* in words */

/* Blocks: up to BLOCK_ROWS rows by NARROW panels, or up to WIDE_ROWS rows by WIDE panels. All sums, the weights and one
 * input are in registers: 32 on AVX-512. The more even the two sides, the fewer loads for a product, which counts most
 * where another program computes on the same core: a loop of 9 x 3 or 6 x 4 is a tenth faster there than 12 x 2. With
 * 27 sums in float32, gcc keeps some in memory, so those blocks have FLOAT_ROWS. */
#if defined(__AVX512F__)
enum { BLOCK_ROWS = 9, FLOAT_ROWS = 8, NARROW = 3, WIDE_ROWS = 6, WIDE = 4 };
#else
enum { BLOCK_ROWS = 6, FLOAT_ROWS = 6, NARROW = 1, WIDE_ROWS = 3, WIDE = 2 };
#endif

/* Lines of a slice. In float32 the panels of a slice stay in the L1 cache from block to block; the other types compute
 * more with a line, and have their panels in the L2 cache. FLOAT_LINES divides a segment, the others are whole ones. */
enum { FLOAT_LINES = WIDE == 4 ? 64 : 128, SLICE_WORDS = 768 };

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
enum { INT8_WORDS = 1, RAISE = 128 };
#elif defined(__AVX2__)
enum { INT8_WORDS = 2, RAISE = 0 }; /* bytes 0 and 2 as 16-bit integers, then 1 and 3 */
#else
enum { INT8_WORDS = 1, RAISE = 0 };
#endif

/* words of x that belong to a line */
INLINE int words_of(int type) {
  if (type == BFLOAT16) return HAS_PAIRS ? 1 : 2;
  return type == INT8 ? INT8_WORDS : 1;
}

typedef int16_t shorts __attribute__((vector_size(LANES * 4)));
typedef uint32_t word __attribute__((may_alias));
typedef float word_float __attribute__((may_alias));

/* the weights of a line that are multiplied by its word n of x */
INLINE floats line_weights(floats line, int type, int n) {
  (void)n;
#if !HAS_PAIRS
  if (type == BFLOAT16) return n ? (floats)((words)line & 0xffff0000) : (floats)((words)line << 16);
#endif
  if (type == INT8 && RAISE) return (floats)((words)line ^ 0x80808080);
  if (type == INT8 && INT8_WORDS == 2) return n ? (floats)((shorts)line >> 8) : (floats)((shorts)line << 8 >> 8);
  return line;
}

INLINE ints line_add8(ints sums, ints w, uint32_t word) {
  ints x = (ints)(word - (words){0});
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#elif defined(__AVX512BW__)
  return sums + (ints)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
  return sums + (ints)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
  for (int shift = 24; shift >= 0; shift -= 8) sums += (w << shift >> 24) * (x << shift >> 24);
  return sums;
#endif
}

INLINE floats line_add(floats sums, floats w, const word *x, int type) {
  if (type == INT8) return (floats)line_add8((ints)sums, (ints)w, *x);
#if HAS_PAIRS
  if (type == BFLOAT16) return add_pairs(sums, (pairs)(*x - (words){0}), (pairs)w);
#endif
  return fused(all(*(const word_float *)x), w, sums);
}

/* What is prefetched while a block is computed: for every two lines, one cache line from each of as many addresses as
 * the block has panels. They then move on by `step` bytes, or by 0 if there is nothing to prefetch: a branch would cost
 * more. */
typedef struct {
  const char *const *panels;
  long at, step; /* in bytes */
} Ahead;

/* vector p of a row of sums: part p % LINE_PARTS of panel p / LINE_PARTS */
INLINE float *sum_at(float *found, int rows, int r, int p) {
  return found + (p / LINE_PARTS * rows + r) * LINE + p % LINE_PARTS * LANES;
}

/* Adds the products of some lines to the sums of a block, [panels][rows][LINE], or sets these if `begin`. x: the rows
 * in the first of the segments, which are `apart` words from each other. */
INLINE void lane_block(float *found, int begin, const word *x, long apart, const char *const *panels, long lines,
                       int rows, int count, int type, const Ahead *ahead) {
  floats sums[BLOCK_ROWS][WIDE * LINE_PARTS], w[WIDE * LINE_PARTS];
  const char *from[WIDE], *soon[WIDE];
  int vectors = count * LINE_PARTS;
  long step = ahead->step;
#pragma GCC unroll 4
  for (int p = 0; p < count; p++) from[p] = panels[p], soon[p] = ahead->panels[p] + ahead->at;
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
    for (int p = 0; p < vectors; p++) sums[r][p] = begin ? all(0) : load(sum_at(found, rows, r, p));
  for (long line = 0; line < lines; x += apart) {
    const word *here = x;
    for (long end = line + SEGMENT / words_of(type); line < end && line < lines;) {
#pragma GCC unroll 4
      for (int p = 0; p < count; p++) __builtin_prefetch(soon[p], 0, 2), soon[p] += step;
#pragma GCC unroll 2
      for (int twice = 0; twice < 2; twice++, line++)
#pragma GCC unroll 2
        for (int n = 0; n < words_of(type); n++, here++) {
#pragma GCC unroll 16
          for (int p = 0; p < vectors; p++) {
            const float *weights = (const float *)(from[p / LINE_PARTS] + line * 64);
            w[p] = line_weights(load(weights + p % LINE_PARTS * LANES), type, n);
          }
#pragma GCC unroll 16
          for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int p = 0; p < vectors; p++) sums[r][p] = line_add(sums[r][p], w[p], here + r * SEGMENT_STRIDE, type);
        }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
    for (int p = 0; p < vectors; p++) store(sum_at(found, rows, r, p), sums[r][p]);
}

/* one function for every block size and type, and tables of them */
typedef void LaneBlock(float *, int, const word *, long, const char *const *, long, const Ahead *);
#define LANE_BLOCK(type, rows, count)                                                                            \
  static void lane_block_##type##_##rows##_##count(float *found, int begin, const word *x, long apart,           \
                                                   const char *const *panels, long lines, const Ahead *ahead) {  \
    lane_block(found, begin, x, apart, panels, lines, rows, count, type, ahead);                                 \
  }
#define LOW_BLOCKS(type, count)                                                            \
  LANE_BLOCK(type, 1, count) LANE_BLOCK(type, 2, count) LANE_BLOCK(type, 3, count)
#define MIDDLE_BLOCKS(type, count)                                                         \
  LANE_BLOCK(type, 4, count) LANE_BLOCK(type, 5, count) LANE_BLOCK(type, 6, count)
#define HIGH_BLOCKS(type, count)                                                           \
  LANE_BLOCK(type, 7, count) LANE_BLOCK(type, 8, count) LANE_BLOCK(type, 9, count)
#define LOW_NAMES(type, count) \
  lane_block_##type##_1_##count, lane_block_##type##_2_##count, lane_block_##type##_3_##count
#define MIDDLE_NAMES(type, count) \
  lane_block_##type##_4_##count, lane_block_##type##_5_##count, lane_block_##type##_6_##count
#define HIGH_NAMES(type, count) \
  lane_block_##type##_7_##count, lane_block_##type##_8_##count, lane_block_##type##_9_##count
#if defined(__AVX512F__)
#define LANE_BLOCKS(type)                                                                                   \
  LOW_BLOCKS(type, NARROW) MIDDLE_BLOCKS(type, NARROW) HIGH_BLOCKS(type, NARROW) LOW_BLOCKS(type, WIDE)     \
  MIDDLE_BLOCKS(type, WIDE)                                                                                 \
  static LaneBlock *const narrow_blocks_##type[] = {LOW_NAMES(type, NARROW), MIDDLE_NAMES(type, NARROW),    \
                                                    HIGH_NAMES(type, NARROW)};                              \
  static LaneBlock *const wide_blocks_##type[] = {LOW_NAMES(type, WIDE), MIDDLE_NAMES(type, WIDE)};
#else
#define LANE_BLOCKS(type)                                                                                   \
  LOW_BLOCKS(type, NARROW) MIDDLE_BLOCKS(type, NARROW) LOW_BLOCKS(type, WIDE)                               \
  static LaneBlock *const narrow_blocks_##type[] = {LOW_NAMES(type, NARROW), MIDDLE_NAMES(type, NARROW)};   \
  static LaneBlock *const wide_blocks_##type[] = {LOW_NAMES(type, WIDE)};
#endif
LANE_BLOCKS(FLOAT32)
#if HAS_TILES
static LaneBlock *const *const narrow_blocks[] = {narrow_blocks_FLOAT32}, *const *const wide_blocks[] = {
    wide_blocks_FLOAT32};
#else
LANE_BLOCKS(BFLOAT16) LANE_BLOCKS(INT8)
static LaneBlock *const *const narrow_blocks[] = {narrow_blocks_FLOAT32, narrow_blocks_BFLOAT16, NULL,
                                                  narrow_blocks_INT8};
static LaneBlock *const *const wide_blocks[] = {wide_blocks_FLOAT32, wide_blocks_BFLOAT16, NULL, wide_blocks_INT8};
#endif

/* the arguments of a call, and what is derived from them */
typedef struct {
  const char *weight; /* tiled, rows of row_bytes */
  long row_bytes;
  const float *x;   /* [rows, inputs] */
  const void *norm; /* x is normed with these weights on the way; or NULL */
  int norm_type;
  float eps;
  const float *scales;   /* of INT8 */
  const void *bias;      /* or NULL */
  const float *residual; /* or NULL; may be out */
  float *out;
  long rows, inputs, outputs;
  int type, bias_type;
  int gated; /* silu of the first half of the outputs times the second half */
  word *ready;     /* x: [segments][rows][SEGMENT_STRIDE] */
  float *x_scales; /* of INT8: of the rows of x */
  int32_t *x_sums;
  long columns, unit; /* columns: panels, or pairs of them if gated; unit: in columns */
  int widens;         /* slices are widened to float32 before they are multiplied */
  int wide;           /* blocks have WIDE panels, else NARROW ones */
  long width, height; /* of a piece: columns and rows */
  long pieces;
  int threads;
  _Atomic int failed;
} LaneLinear;

/* READY_ROWS: rows of x that a thread makes ready at a time; up to FEW_READY values are not worth a second thread.
 * CHUNK_ROWS: most rows of a piece. UNIT_PANELS: of a unit. LISTED: panels listed for one, the last several times.
 * PREFETCHERS: blocks of a slice that prefetch: with more of them, each line would be asked for many times.
 * WIDENED_ROWS: from so many on, widening a slice takes less time than widening its lines in every block. */
enum { READY_ROWS = 8, FEW_READY = 1 << 16, CHUNK_ROWS = 192, UNIT_PANELS = 6, LISTED = UNIT_PANELS + WIDE };
enum { PREFETCHERS = 8, WIDENED_ROWS = 64 };

/* most rows of a block of NARROW panels */
INLINE long narrow_rows(int type) { return type == FLOAT32 ? FLOAT_ROWS : BLOCK_ROWS; }

/* whether blocks of WIDE panels have more sums than those of NARROW ones, if there are so many rows */
INLINE int is_wide(long rows, int type) {
  long most = narrow_rows(type), narrow_blocks = (rows + most - 1) / most;
  return WIDE * narrow_blocks > NARROW * ((rows + WIDE_ROWS - 1) / WIDE_ROWS);
}

INLINE long slice_lines(int type) { return type == FLOAT32 ? FLOAT_LINES : SLICE_WORDS / words_of(type); }

static void ready_words(const LaneLinear *t, long row, const word *from, long count) {
  for (long n = 0; n < count; n += SEGMENT)
    memcpy(t->ready + (n / SEGMENT * t->rows + row) * SEGMENT_STRIDE, from + n,
           (count - n < SEGMENT ? count - n : SEGMENT) * 4);
}

/* a row of x; scratch: the row in float32, then as bytes, then as words */
static void lane_ready(const LaneLinear *t, long row, float *scratch) {
  const float *x = t->x + row * t->inputs;
  word *found = (word *)(scratch + t->inputs);
  long count = t->row_bytes / 4;
  if (t->norm) norm(scratch, x, t->norm, t->norm_type, t->inputs, t->eps), x = scratch;
  if (t->type == INT8) {
    int8_t *bytes = (int8_t *)(found + t->row_bytes / 2);
    t->x_scales[row] = quantize_row(bytes, t->x_sums + row, x, t->inputs, t->row_bytes);
    if (INT8_WORDS == 2)
      for (long n = 0; n < count; n++, bytes += 4) {
        found[2 * n] = (uint16_t)bytes[0] | (uint32_t)(uint16_t)bytes[2] << 16;
        found[2 * n + 1] = (uint16_t)bytes[1] | (uint32_t)(uint16_t)bytes[3] << 16;
      }
    ready_words(t, row, INT8_WORDS == 2 ? found : (word *)bytes, count * INT8_WORDS);
    return;
  }
#if HAS_PAIRS
  if (t->type == BFLOAT16) {
    round_row((uint16_t *)found, x, t->inputs, t->inputs);
    ready_words(t, row, found, count);
    return;
  }
#endif
  ready_words(t, row, (const word *)x, t->inputs);
}

static void lane_ready_piece(void *work, long n) {
  LaneLinear *t = work;
  float *scratch = scratch_for(SCRATCH_PANELS, t->inputs * 4 + t->row_bytes * 3);
  if (!scratch) t->failed = 1;
  for (long row = n * READY_ROWS; scratch && row < (n + 1) * READY_ROWS && row < t->rows; row++)
    lane_ready(t, row, scratch);
}

/* LANES results of one row of x from their sums; output: index of the first */
INLINE floats lane_value(const LaneLinear *t, const float *sums, long row, long output) {
  floats value = load(sums);
  if (t->type == INT8)
    value = __builtin_convertvector((ints)value - RAISE * t->x_sums[row], floats) * all(t->x_scales[row]) *
            load(t->scales + output);
  if (t->bias && t->bias_type == FLOAT32) value += load((const float *)t->bias + output);
  if (t->bias && t->bias_type == BFLOAT16) value += load_as((const uint16_t *)t->bias + output, BFLOAT16);
  if (t->bias && t->bias_type == FLOAT16) value += load_as((const uint16_t *)t->bias + output, FLOAT16);
  return value;
}

/* the results of a column from the sums of its panel, or of its two panels: [rows][LINE] each */
static void lane_end(const LaneLinear *t, const float *sums, long row, long rows, long column) {
  long first = column * LINE, half = t->outputs / 2;
  for (long r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (long i = 0; i < LINE; i += LANES) {
      const float *from = sums + r * LINE + i;
      floats value = lane_value(t, from, row + r, first + i);
      if (t->gated) {
        value = silu(value) * lane_value(t, from + rows * LINE, row + r, half + first + i);
        store(t->out + (row + r) * half + first + i, value);
        continue;
      }
      long index = (row + r) * t->outputs + first + i;
      if (t->residual) value += load(t->residual + index);
      store(t->out + index, value);
    }
}

/* the panels of a unit, as many as its blocks need: the last unit may have fewer columns, whose last panel is then
 * computed several times */
static void unit_panels(const LaneLinear *t, long column, long columns, const char **panels) {
  long size = LINE * t->row_bytes;
  int count = 0;
  for (long n = column; n < column + columns; n++) {
    panels[count++] = t->weight + n * size;
    if (t->gated) panels[count++] = t->weight + (n + t->columns) * size;
  }
  for (; count < LISTED; count++) panels[count] = panels[count - 1];
}

/* Some lines of bfloat16 panels as lines of float32, twice as many. */
static void widen_panels(float *to, const char *const *panels, int count, long lines) {
  for (int p = 0; p < count; p++)
    for (long line = 0; line < lines; line++, to += 2 * LINE)
#pragma GCC unroll 2
      for (int part = 0; part < LINE_PARTS; part++) {
        floats both = load((const float *)(panels[p] + line * 64) + part * LANES);
        store(to + part * LANES, line_weights(both, BFLOAT16, 0));
        store(to + LINE + part * LANES, line_weights(both, BFLOAT16, 1));
      }
}

/* A unit by a chunk of rows, slice by slice. Each block of rows prefetches its part of the next slice, or of the first
 * one of the unit at column `next`, so that memory is read at an even pace; none: -1. */
static void lane_unit(const LaneLinear *t, long row, long rows, long column, long columns, long next) {
  float sums[CHUNK_ROWS * UNIT_PANELS * LINE] __attribute__((aligned(64)));
  const char *lists[2][LISTED], **panels = lists[0], **after = lists[1];
  int each = t->gated ? 2 : 1, count = (int)columns * each, wide = t->wide && count > NARROW;
  int group = wide ? WIDE : NARROW;
  int type = t->widens ? FLOAT32 : t->type, by = t->widens ? 2 : 1; /* by: lines multiplied for each that is read */
  float widened[UNIT_PANELS * FLOAT_LINES * LINE] __attribute__((aligned(64)));
  const char *wide_list[LISTED];
  LaneBlock *const *sizes = (wide ? wide_blocks : narrow_blocks)[type];
  long most = t->wide ? WIDE_ROWS : narrow_rows(type), blocks = (rows + most - 1) / most;
  long few = rows / blocks, larger = rows % blocks; /* blocks have that many rows, and so many of them one more */
  long room = (count + group - 1) / group * group * LINE, apart = t->rows * SEGMENT_STRIDE; /* room: for a row's sums */
  long all = t->row_bytes / 4, depth = blocks > 1 || t->widens ? slice_lines(type) / by : all;
  long prefetchers = blocks < PREFETCHERS / by ? blocks : PREFETCHERS / by;
  long pace = blocks > 1 ? 128 / by / prefetchers : 0; /* one block waits for memory anyway */
  unit_panels(t, column, columns, panels);
  for (long line = 0; line < all; line += depth) {
    long lines = all - line < depth ? all - line : depth, first = line * words_of(t->type);
    const word *x = t->ready + (first / SEGMENT * t->rows + row) * SEGMENT_STRIDE + first % SEGMENT;
    int last = line + lines == all, fetches = pace && !(last && next < 0);
    if (last && fetches)
      unit_panels(t, next, columns, after);
    else
      for (int p = 0; p < LISTED; p++) after[p] = panels[p] + (last ? 0 : lines * 64);
    if (t->widens) {
      widen_panels(widened, panels, count, lines);
      for (int p = 0; p < LISTED; p++)
        wide_list[p] = (const char *)(widened + (p < count ? p : count - 1) * lines * by * LINE);
    }
    for (long n = 0, at = 0; n < blocks; n++) {
      long these = few + (n < larger), step = fetches && n < prefetchers ? pace : 0;
      float *found = sums + at * room;
      for (int p = 0; p < count; p += group) {
        Ahead ahead = {(step ? after : panels) + p, n * lines * by / 2 * step, step};
        LaneBlock *block = sizes[these - 1];
        const char *const *list = (t->widens ? wide_list : panels) + p;
        block(found + p * these * LINE, line == 0, x + at * SEGMENT_STRIDE, apart, list, lines * by, &ahead);
      }
      for (long i = 0; last && i < columns; i++)
        lane_end(t, found + i * each * these * LINE, row + at, these, column + i);
      at += these;
    }
    const char **done = panels;
    panels = after, after = done;
  }
}

static void lane_piece(void *work, long n) {
  const LaneLinear *t = work;
  long across = (t->columns + t->width - 1) / t->width, chunk = n / across;
  long column = n % across * t->width, end = column + t->width < t->columns ? column + t->width : t->columns;
  long row = chunk * t->height, rows = t->rows - row < t->height ? t->rows - row : t->height;
  for (; column < end; column += t->unit) {
    long next = column + t->unit, later = next < end ? n : piece_after(n, t->pieces);
    if (next >= end) next = later < 0 ? -1 : later % across * t->width;
    lane_unit(t, row, rows, column, end - column < t->unit ? end - column : t->unit, next);
  }
}

/* Chooses the size of units, slices and pieces. A piece takes 50 to 100 microseconds, unless that is less than a unit:
 * a core reads about 10 bytes of weights per nanosecond and multiplies about 140 of them by a row of x. */
static void lane_shape(LaneLinear *t) {
  enum { PIECE = 1 << 23, CACHED = 1 << 17 };
  long each = t->gated ? 2 : 1, words = t->row_bytes / 4 * words_of(t->type);
  long most = CACHED / (words < SLICE_WORDS ? words : SLICE_WORDS); /* their inputs stay in the L2 cache */
  most = most > CHUNK_ROWS ? CHUNK_ROWS : most;
  long chunks = (t->rows + most - 1) / most;
  t->height = (t->rows + chunks - 1) / chunks, chunks = (t->rows + t->height - 1) / t->height;
  t->columns = t->outputs / LINE / each;
  t->widens = t->type == BFLOAT16 && !HAS_PAIRS && t->height >= WIDENED_ROWS;
  t->wide = is_wide(t->height, t->widens ? FLOAT32 : t->type);
  t->unit = t->wide ? WIDE / each : NARROW % each ? NARROW : NARROW / each; /* so that its panels fill its blocks */
  long widest = PIECE / ((16 + t->height) * LINE * t->row_bytes * each), width = t->columns / (t->threads * 4L);
  width = (width < widest ? width : widest) / t->unit * t->unit;
  t->width = width < t->unit ? t->unit : width;
  t->pieces = (t->columns + t->width - 1) / t->width * chunks;
}

/* Returns 0, or 1 if memory ran out. */
static int linear_lanes(LaneLinear *t, int threads) {
  if (t->rows < 1) return 0;
  t->threads = threads;
  lane_shape(t);
  long segments = (t->row_bytes / 4 * words_of(t->type) + SEGMENT - 1) / SEGMENT;
  t->ready = scratch_for(SCRATCH_TILES, segments * t->rows * SEGMENT_STRIDE * 4);
  t->x_scales = scratch_for(SCRATCH_ROWS, t->rows * (sizeof(float) + sizeof(int32_t)));
  if (!t->ready || !t->x_scales) return 1;
  t->x_sums = (int32_t *)(t->x_scales + t->rows);
  int few = t->rows * t->inputs <= FEW_READY;
  share(few ? 1 : threads, (t->rows + READY_ROWS - 1) / READY_ROWS, lane_ready_piece, t);
  if (!t->failed) share(threads, t->pieces, lane_piece, t);
  return t->failed;
}
#endif
