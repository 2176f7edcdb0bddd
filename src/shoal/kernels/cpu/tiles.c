/* Linear layers in tiles of 16 by 16: Intel's AMX, for bfloat16 and for 8-bit weights. Part of native.c.
 *
 * A product of tiles takes its left side in memory order, 16 rows of 64 bytes, and its right side transposed: 16 groups
 * of four bytes by 16 columns. The weights of a model are tiled once, in place, before the first pass:
 *
 *     sums = x W'      W is tiled: tiles of 16 outputs by 64 bytes, one behind the other; x is read row by row
 *
 * Other weights stay in torch's layout, without a second copy, so one side is transposed on the way:
 *
 *     few rows of x:   sums' = W x'    x is small and transposed; weights are streamed, 16 rows at a time; sums are
 *                                      transposed back
 *     many rows of x:  sums  = x W'    32 rows of W are transposed, then multiplied by all rows of x
 *
 * x is rounded to bfloat16 or to bytes and padded with zeros. Every sum runs over the inputs from left to right in one
 * accumulator, the same products in the same order in all cases, so other rows change no bit. The instructions flush
 * denormals to 0, whatever mode the process has set.
 *
 * SHOAL_PRETEND_TILES computes the tiles in plain C, for tests on machines without AMX. */

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES 1
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
/* The compiler's intrinsics do not declare the memory that they read. */
#define tile_zero(n) __asm__ volatile("tilezero %%tmm" #n ::)
#define tile_load(n, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #n ::"r"(from), "r"((long)(stride)) : "memory")
/* the same for data that is not reused soon: it does not evict other lines from the L1 cache */
#define tile_load_once(n, from, stride) \
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #n ::"r"(from), "r"((long)(stride)) : "memory")
#define tile_store(n, to, stride) \
  __asm__ volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
#define tile_add_bfloat16(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)
#define tile_add_int8(sums, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)
#define tiles_begin(shape) __asm__ volatile("ldtilecfg (%0)" ::"r"(shape) : "memory")
#define tiles_end() __asm__ volatile("tilerelease" ::)
/* prefetch a line that will be written; otherwise every store would wait for its line */
#define fetch_to_write(line) __asm__ volatile("prefetchw (%0)" ::"r"(line))

/* Linux grants the tile registers to processes that request them. Returns 0 if granted, else errno. */
static int tiles_permitted(void) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? errno : 0;
}
#elif defined(SHOAL_PRETEND_TILES)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

enum { TILE_ROWS = 16, TILE_BYTES = 64, TILE_SIZE = TILE_ROWS * TILE_BYTES };

#if HAS_TILES
/* the operand of ldtilecfg */
typedef struct {
  uint8_t palette, start, unused[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} __attribute__((aligned(64))) TileShape;

#ifdef SHOAL_PRETEND_TILES
static __thread TileShape pretended_shape;
static __thread char pretended[8][TILE_SIZE];

static void pretend_load(int n, const char *from, long stride) {
  memset(pretended[n], 0, TILE_SIZE);
  for (int r = 0; r < pretended_shape.rows[n]; r++)
    memcpy(pretended[n] + r * TILE_BYTES, from + r * stride, pretended_shape.bytes[n]);
}
static void pretend_store(int n, char *to, long stride) {
  for (int r = 0; r < pretended_shape.rows[n]; r++)
    memcpy(to + r * stride, pretended[n] + r * TILE_BYTES, pretended_shape.bytes[n]);
}
static void pretend_bfloat16(int sums, int a, int b) {
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++)
      for (int k = 0; k < 16; k++)
        for (int half = 0; half < 2; half++)
          ((float *)pretended[sums])[r * 16 + c] +=
              load_one((uint16_t *)pretended[a] + r * 32 + k * 2 + half, BFLOAT16) *
              load_one((uint16_t *)pretended[b] + k * 32 + c * 2 + half, BFLOAT16);
}
static void pretend_int8(int sums, int a, int b) {
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++)
      for (int k = 0; k < 64; k++)
        ((int32_t *)pretended[sums])[r * 16 + c] +=
            ((int8_t *)pretended[a])[r * 64 + k] * ((int8_t *)pretended[b])[k / 4 * 64 + c * 4 + k % 4];
}
#define tile_zero(n) memset(pretended[n], 0, TILE_SIZE)
#define tile_load(n, from, stride) pretend_load(n, (const char *)(from), stride)
#define tile_load_once(n, from, stride) tile_load(n, from, stride)
#define tile_store(n, to, stride) pretend_store(n, (char *)(to), stride)
#define tile_add_bfloat16(sums, a, b) pretend_bfloat16(sums, a, b)
#define tile_add_int8(sums, a, b) pretend_int8(sums, a, b)
#define tiles_begin(shape) (pretended_shape = *(shape))
#define tiles_end() ((void)0)
#define fetch_to_write(line) ((void)(line))
static int tiles_permitted(void) { return 0; }
#endif
#else
static int tiles_permitted(void) { return 0; }
#endif

static void transpose16(uint32_t *to, const char *from, long stride) { transpose16_to(to, TILE_ROWS, from, stride); }

#if HAS_TILES
/* [rows, columns] words to [columns, rows] */
static void transpose_words(uint32_t *to, const uint32_t *from, long rows, long columns) {
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < columns; j++) to[j * rows + i] = from[i * columns + j];
}

/* 32 values of a tile's row, rounded */
INLINE void narrow_line(uint16_t *to, const float *from) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + LANES), (__m512)load(from)));
#else
  for (long i = 0; i < 32; i += LANES) store_as(to + i, load(from + i), BFLOAT16);
#endif
}

/* the arguments of a call, and what is derived from them */
typedef struct {
  const char *weight; /* rows of row_bytes */
  long row_bytes;
  const float *x; /* [rows, inputs] */
  const void *norm; /* many only: x is normed with these weights on the way; or NULL */
  int norm_type;
  float eps;
  int8_t *bytes;  /* x in 8 bits, [rows, row_bytes]; or NULL */
  float *x_scales;
  int32_t *x_sums;
  const float *scales; /* of 8-bit weights */
  const void *bias;      /* or NULL */
  const float *residual; /* or NULL; may be out */
  float *out;
  long rows, inputs, outputs, steps;
  int bias_type;
  int columns[2]; /* of the first and second tile of x: below 16 only if there are no more rows */
  int tiled;       /* weights are in tiles */
  int many;       /* many rows, or tiled: x is not transposed */
  int gated;      /* tiled only: silu of the first half of the outputs times the second half */
  char *ready;    /* x: for each 16 rows, steps of TILE_SIZE bytes, or 64 bytes per column if there are fewer */
  int is_ready;   /* the caller has filled `ready` */
  char *made;     /* gated, 16 bits: results go here, rounded, as the next call's `ready`, instead of to out; or NULL */
} TiledLinear;

/* 16 rows or columns: the tiles of all steps, from left to right */
typedef struct {
  const char *tiles;
  long stride, step;
  const char *last; /* the last tile, padded, if it is not full; or NULL */
} Side;

enum { MANY_TILES = 9 }; /* tiles of x from which on the weights are transposed instead of x */

/* Reserves scratch for x in 8 bits, for weights with these scales. Returns 0 if memory ran out. */
static int reserve_bytes(TiledLinear *t, const float *scales) {
  float *steps = scratch_for(SCRATCH_ROWS, t->rows * (t->row_bytes + sizeof(float) + sizeof(int32_t)));
  if (!steps) return 0;
  t->scales = scales, t->x_scales = steps, t->x_sums = (int32_t *)(steps + t->rows);
  t->bytes = (int8_t *)(t->x_sums + t->rows);
  return 1;
}

/* the 64 bytes of a row and step, in tiles of `steps` steps with t->columns rows */
INLINE char *line_of(const TiledLinear *t, char *tiles, long steps, long row, long step) {
  long tile = row / TILE_ROWS;
  return tiles + (tile * steps * TILE_ROWS + step * t->columns[tile % 2] + row % TILE_ROWS) * TILE_BYTES;
}

/* n of 32 values, rounded; then zeros */
static void narrow_some(uint16_t *to, const float *from, long n) {
  long k = 0;
  for (; k + LANES <= n; k += LANES) store_as(to + k, load(from + k), BFLOAT16);
  for (; k < n; k++) store_one(to + k, from[k], BFLOAT16);
  for (; k < 32; k++) to[k] = 0;
}

static void tile_bytes(const TiledLinear *t, long row, const float *x) {
  t->x_scales[row] = quantize_row(t->bytes + row * t->row_bytes, t->x_sums + row, x, t->inputs, t->row_bytes);
}

/* writes a row of x into its tiles; rows past the last one are zeros. scratch: a row in float32 */
static void ready_row(const TiledLinear *t, long row, float *scratch) {
  const float *x = t->x + row * t->inputs;
  if (row >= t->rows) {
    for (long s = 0; s < t->steps; s++) memset(line_of(t, t->ready, t->steps, row, s), 0, TILE_BYTES);
    return;
  }
  if (t->norm && !scratch) return; /* the call fails */
  if (t->norm) norm(scratch, x, t->norm, t->norm_type, t->inputs, t->eps), x = scratch;
  if (t->bytes) tile_bytes(t, row, x);
  for (long s = 0; s < t->steps; s++) {
    char *line = line_of(t, t->ready, t->steps, row, s);
    if (t->bytes)
      memcpy(line, t->bytes + row * t->row_bytes + s * TILE_BYTES, TILE_BYTES);
    else if (s * 32 + 32 <= t->inputs)
      narrow_line((uint16_t *)line, x + s * 32);
    else
      narrow_some((uint16_t *)line, x + s * 32, t->inputs - s * 32);
  }
}

/* one step of up to 16 rows of x, transposed */
static void ready_transposed(const TiledLinear *t, long tile, long step) {
  uint32_t lines[TILE_SIZE / 4];
  int columns = t->columns[tile % 2];
  long first = tile * TILE_ROWS, rows = t->rows - first < columns ? t->rows - first : columns;
  char *to = line_of(t, t->ready, t->steps, first, step);
  if (rows < columns) memset(lines, 0, TILE_SIZE);
  for (long i = 0; i < rows; i++) {
    uint16_t *line = (uint16_t *)(lines + i * TILE_ROWS);
    const float *from = t->x + (first + i) * t->inputs + step * 32;
    if (t->bytes)
      memcpy(line, t->bytes + (first + i) * t->row_bytes + step * TILE_BYTES, TILE_BYTES);
    else if (step * 32 + 32 <= t->inputs)
      narrow_line(line, from);
    else
      narrow_some(line, from, t->inputs - step * 32);
  }
  if (columns == TILE_ROWS)
    transpose16((uint32_t *)to, (const char *)lines, TILE_BYTES);
  else
    transpose_words((uint32_t *)to, lines, columns, 16);
}

static void copy_tile(char *to, const char *from, long stride, long rows, long bytes) {
  memset(to, 0, TILE_SIZE);
  for (long r = 0; r < rows; r++) memcpy(to + r * TILE_BYTES, from + r * stride, bytes);
}

/* 16 rows of tiled weights */
static Side tiled_panel(const TiledLinear *t, long n, char *scratch) {
  (void)scratch;
  return (Side){t->weight + n * TILE_ROWS * t->row_bytes, TILE_BYTES, TILE_SIZE, NULL};
}

/* 16 rows of weights in torch's layout; scratch: a tile per step */
static Side panel_of(const TiledLinear *t, long n, char *scratch) {
  Side found = {t->weight + n * TILE_ROWS * t->row_bytes, t->row_bytes, TILE_BYTES, NULL};
  long rows = t->outputs - n * TILE_ROWS, rest = t->row_bytes % TILE_BYTES;
  if (rows >= TILE_ROWS && !rest) return found;
  long first = rows < TILE_ROWS ? 0 : t->steps - 1;
  for (long s = first; s < t->steps; s++)
    copy_tile(scratch + s * TILE_SIZE, found.tiles + s * TILE_BYTES, t->row_bytes, rows < TILE_ROWS ? rows : TILE_ROWS,
              s == t->steps - 1 && rest ? rest : TILE_BYTES);
  if (first) found.last = scratch + first * TILE_SIZE;
  if (!first) found.tiles = scratch, found.stride = TILE_BYTES, found.step = TILE_SIZE;
  return found;
}

/* the same, transposed */
static Side transposed_panel(const TiledLinear *t, long n, char *scratch) {
  Side from = panel_of(t, n, scratch), found = {scratch + t->steps * TILE_SIZE, TILE_BYTES, TILE_SIZE, NULL};
  for (long s = 0; s < t->steps; s++) {
    int last = from.last && s == t->steps - 1;
    transpose16((uint32_t *)(found.tiles + s * TILE_SIZE), last ? from.last : from.tiles + s * from.step,
           last ? TILE_BYTES : from.stride);
  }
  return found;
}

/* passing: the side that is not reused soon */
enum { LEFT, RIGHT };

INLINE void tile_step(const char *const *left, const long *left_stride, const char *const *right,
                      const long *right_stride, int lefts, int rights, int bytes, int passing) {
#define TILE_ADD(sums, a, b)                   \
  do {                                         \
    if (bytes) tile_add_int8(sums, a, b);      \
    if (!bytes) tile_add_bfloat16(sums, a, b); \
  } while (0)
#define TILE_TAKE(n, side, from, stride)                     \
  do {                                                       \
    if (passing == side) tile_load_once(n, from, stride);    \
    if (passing != side) tile_load(n, from, stride);         \
  } while (0)
  TILE_TAKE(6, RIGHT, right[0], right_stride[0]);
  TILE_TAKE(4, LEFT, left[0], left_stride[0]);
  TILE_ADD(0, 4, 6);
  if (lefts > 1) {
    TILE_TAKE(5, LEFT, left[1], left_stride[1]);
    TILE_ADD(1, 5, 6);
  }
  if (rights > 1) {
    TILE_TAKE(7, RIGHT, right[1], right_stride[1]);
    TILE_ADD(2, 4, 7);
    if (lefts > 1) TILE_ADD(3, 5, 7);
  }
#undef TILE_ADD
#undef TILE_TAKE
}

/* What is prefetched while tiles are multiplied: at every step `pace` lines from each of two addresses, and some of the
 * rows of the results. */
typedef struct {
  const char *soon[2];
  int pace;
  char *results;
  long stride, apart; /* between rows, and between the lines of a row */
  int rows, lines;
} Fetch;

/* one or two left sides by one or two right ones: sums of left l and right r go to to[2 r + l], in rows of to_stride[r]
 * bytes */
INLINE void tile_block(const Side *lefts_of, const Side *rights_of, long steps, int lefts, int rights, int bytes,
                       int passing, float *const *to, const long *to_stride, const Fetch *fetch) {
  const char *one = fetch->soon[0], *other = fetch->soon[1];
  char *result = fetch->results, *results_end = result + fetch->rows * fetch->stride;
  long some = (fetch->rows + steps - 1) / steps * fetch->stride;
  const char *left[2], *right[2];
  long left_stride[2], right_stride[2];
  for (int n = 0; n < lefts; n++) left[n] = lefts_of[n].tiles, left_stride[n] = lefts_of[n].stride;
  for (int n = 0; n < rights; n++) right[n] = rights_of[n].tiles, right_stride[n] = rights_of[n].stride;
  tile_zero(0);
  if (lefts > 1) tile_zero(1);
  if (rights > 1) tile_zero(2);
  if (rights > 1 && lefts > 1) tile_zero(3);
  long whole = lefts_of[0].last || lefts_of[lefts - 1].last ? steps - 1 : steps;
  for (long s = 0; s < whole; s++) {
    for (int n = 0; n < fetch->pace; n++, one += 64, other += 64)
      __builtin_prefetch(one, 0, 2), __builtin_prefetch(other, 0, 2);
    for (char *end = result + some; result < end && result < results_end; result += fetch->stride)
      for (int n = 0; n < fetch->lines; n++) fetch_to_write(result + n * fetch->apart);
    tile_step(left, left_stride, right, right_stride, lefts, rights, bytes, passing);
    for (int n = 0; n < lefts; n++) left[n] += lefts_of[n].step;
    for (int n = 0; n < rights; n++) right[n] += rights_of[n].step;
  }
  if (whole < steps) {
    for (int n = 0; n < lefts; n++)
      if (lefts_of[n].last) left[n] = lefts_of[n].last, left_stride[n] = TILE_BYTES;
    tile_step(left, left_stride, right, right_stride, lefts, rights, bytes, passing);
  }
  tile_store(0, to[0], to_stride[0]);
  if (lefts > 1) tile_store(1, to[1], to_stride[0]);
  if (rights > 1) tile_store(2, to[2], to_stride[1]);
  if (rights > 1 && lefts > 1) tile_store(3, to[3], to_stride[1]);
}

typedef void TileBlock(const Side *, const Side *, long, float *const *, const long *, const Fetch *);
#define TILE_BLOCK(lefts, rights, bytes, passing)                                                                    \
  static void tile_block_##lefts##_##rights##_##bytes##_##passing(const Side *left, const Side *right, long steps,   \
                                                                  float *const *to, const long *to_stride,           \
                                                                  const Fetch *fetch) {                              \
    tile_block(left, right, steps, lefts, rights, bytes, passing, to, to_stride, fetch);                             \
  }
#define TILE_BLOCKS(bytes, passing)                                                                                  \
  TILE_BLOCK(1, 1, bytes, passing) TILE_BLOCK(1, 2, bytes, passing)                                                  \
  TILE_BLOCK(2, 1, bytes, passing) TILE_BLOCK(2, 2, bytes, passing)
TILE_BLOCKS(0, LEFT) TILE_BLOCKS(0, RIGHT) TILE_BLOCKS(1, LEFT) TILE_BLOCKS(1, RIGHT)
#define TILE_TABLE(bytes, passing)                                                       \
  {                                                                                      \
    {tile_block_1_1_##bytes##_##passing, tile_block_1_2_##bytes##_##passing},            \
        {tile_block_2_1_##bytes##_##passing, tile_block_2_2_##bytes##_##passing},        \
  }
static TileBlock *const tile_blocks[2][2][2][2] = {
    {TILE_TABLE(0, LEFT), TILE_TABLE(0, RIGHT)},
    {TILE_TABLE(1, LEFT), TILE_TABLE(1, RIGHT)},
};

/* LANES results of one row of x from their sums; output: index of the first */
INLINE floats tile_value(const TiledLinear *t, const float *sums, const float *bias, long row, long output) {
  floats value = load(sums);
  if (t->bytes)
    value = __builtin_convertvector((ints)value, floats) * all(t->x_scales[row]) * load(t->scales + output);
  return t->bias ? value + load(bias) : value;
}

/* one row of x: 16 outputs from `first` on */
INLINE void tile_row(const TiledLinear *t, const float *sums, const float *bias, long row, long first) {
  long index = row * t->outputs + first;
#pragma GCC unroll 4
  for (int i = 0; i < TILE_ROWS; i += LANES) {
    floats value = tile_value(t, sums + i, bias + i, row, first + i);
    if (t->residual) value += load(t->residual + index + i);
    store(t->out + index + i, value);
  }
}

/* `count` of them */
static void tile_row_end(const TiledLinear *t, const float *sums, const float *bias, long row, long first, long count) {
  for (long i = 0; i < count; i++) {
    long index = row * t->outputs + first + i;
    float value = sums[i];
    int32_t whole;
    memcpy(&whole, sums + i, 4);
    if (t->bytes) value = (float)whole * t->x_scales[row] * t->scales[first + i];
    if (t->bias) value += bias[i];
    if (t->residual) value += t->residual[index];
    t->out[index] = value;
  }
}

/* converts a tile of sums, [outputs, rows of x] or, if there are many rows, the transpose, to results */
static void tile_end(const TiledLinear *t, const float *sums, long panel, long tile) {
  float transposed[TILE_SIZE / 4] __attribute__((aligned(64))), bias[TILE_ROWS];
  int columns = t->columns[tile % 2];
  long row = tile * TILE_ROWS, rows = t->rows - row < columns ? t->rows - row : columns;
  long first = panel * TILE_ROWS, count = t->outputs - first < TILE_ROWS ? t->outputs - first : TILE_ROWS;
  if (t->bias)
    for (long i = 0; i < count; i++) bias[i] = load_any(t->bias, first + i, t->bias_type);
  if (!t->many && columns == TILE_ROWS) transpose16((uint32_t *)transposed, (const char *)sums, TILE_BYTES);
  if (!t->many && columns < TILE_ROWS)
    transpose_words((uint32_t *)transposed, (const uint32_t *)sums, TILE_ROWS, columns);
  const float *lines = t->many ? sums : transposed;
  for (long i = 0; i < rows; i++)
    if (count == TILE_ROWS)
      tile_row(t, lines + i * TILE_ROWS, bias, row + i, first);
    else
      tile_row_end(t, lines + i * TILE_ROWS, bias, row + i, first, count);
}

/* 16 results, rounded */
INLINE void narrow_half(uint16_t *to, const float *from) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)load(from)));
#else
  for (long i = 0; i < TILE_ROWS; i += LANES) store_as(to + i, load(from + i), BFLOAT16);
#endif
}

/* converts two tiles of sums, of a gate's panel and of the gated one, to results: silu(gate) times the other */
static void gate_end(const TiledLinear *t, const float *gate, const float *sums, long panel, long tile) {
  float bias[2][TILE_ROWS], narrowed[TILE_ROWS];
  int columns = t->columns[tile % 2];
  long row = tile * TILE_ROWS, rows = t->rows - row < columns ? t->rows - row : columns;
  long half = t->outputs / 2, first = panel * TILE_ROWS;
  if (t->bias)
    for (long i = 0; i < 2 * TILE_ROWS; i++)
      bias[i / TILE_ROWS][i % TILE_ROWS] =
          load_any(t->bias, i / TILE_ROWS * half + first + i % TILE_ROWS, t->bias_type);
  for (long r = 0; r < columns; r++) {
    uint16_t *made = t->made ? (uint16_t *)line_of(t, t->made, half / 32, row + r, first / 32) + first % 32 : NULL;
    if (r >= rows) {
      if (made) memset(made, 0, TILE_ROWS * 2);
      continue;
    }
    float *to = made ? narrowed : t->out + (row + r) * half + first;
#pragma GCC unroll 4
    for (int i = 0; i < TILE_ROWS; i += LANES) {
      floats x = tile_value(t, gate + r * TILE_ROWS + i, bias[0] + i, row + r, first + i);
      floats y = tile_value(t, sums + r * TILE_ROWS + i, bias[1] + i, row + r, half + first + i);
      store(to + i, silu(x) * y);
    }
    if (made) narrow_half(made, narrowed);
  }
}

/* prefetches the results of some tiles of x and some panels */
static void fetch_results(const TiledLinear *t, long panel, int panels, long tile, int tiles, Fetch *fetch) {
  long width = t->gated ? t->outputs / 2 : t->outputs, left = t->rows - tile * TILE_ROWS;
  fetch->rows = (int)(left < tiles * TILE_ROWS ? left : tiles * TILE_ROWS);
  if (t->made) {
    fetch->results = line_of(t, t->made, width / 32, tile * TILE_ROWS, panel / 2), fetch->stride = TILE_BYTES;
    fetch->rows = left < TILE_ROWS ? (int)left : TILE_ROWS;
    fetch->lines = tiles, fetch->apart = width / 32 * TILE_SIZE;
    return;
  }
  fetch->results = (char *)(t->out + tile * TILE_ROWS * width + panel * TILE_ROWS), fetch->stride = width * 4;
  fetch->lines = t->gated ? 1 : panels, fetch->apart = TILE_BYTES;
}

/* one or two panels by one or two tiles of x */
static void tile_pair(const TiledLinear *t, const Side *w, long panel, int panels, long tile, int tiles, Fetch *fetch) {
  float found[4][TILE_SIZE / 4] __attribute__((aligned(64))), *to[4];
  long to_stride[2] = {TILE_BYTES, TILE_BYTES};
  Side x[2];
  for (int n = 0; n < tiles; n++) {
    long width = t->many ? TILE_BYTES : t->columns[n] * 4;
    x[n] = (Side){t->ready + (tile + n) * t->steps * TILE_SIZE, width, t->columns[n] * TILE_BYTES, NULL};
    to_stride[n] = width;
  }
  int lefts = t->many ? tiles : panels, rights = t->many ? panels : tiles;
  int whole = (t->tiled && t->rows <= 2 * TILE_ROWS) || (tile + tiles) * TILE_ROWS <= t->rows;
  int straight = t->many && !t->gated && !t->bytes && !t->bias && !t->residual && whole &&
                 (panel + panels) * TILE_ROWS <= t->outputs; /* the sums are the results */
  for (int l = 0; l < lefts; l++)
    for (int r = 0; r < rights; r++)
      to[2 * r + l] =
          straight ? t->out + (tile + l) * TILE_ROWS * t->outputs + (panel + r) * TILE_ROWS : found[2 * r + l];
  if (straight) to_stride[0] = to_stride[1] = t->outputs * 4;
  fetch_results(t, panel, panels, tile, tiles, fetch);
  int passing = t->tiled && t->rows <= 2 * TILE_ROWS ? RIGHT : LEFT; /* weights by few rows, many rows by weights */
  TileBlock *block = tile_blocks[t->bytes != NULL][passing][lefts - 1][rights - 1];
  block(t->many ? x : w, t->many ? w : x, t->steps, to, to_stride, fetch);
  if (straight) return;
  for (int l = 0; l < lefts && t->gated; l++) gate_end(t, found[l], found[2 + l], panel, tile + l);
  for (int l = 0; l < lefts && !t->gated; l++)
    for (int r = 0; r < rights; r++)
      tile_end(t, found[2 * r + l], panel + (t->many ? r : l), tile + (t->many ? l : r));
}

/* Some panels by some tiles of x. Two panels at once: neighbours, or a gate's panel and the gated one, which is half of
 * all panels further on. */
typedef struct {
  long panel, panels, tile, tiles;
} TileTask;

/* the pieces of a call: all panels by some tiles of x, which stay in the L2 cache meanwhile, then all panels by the
 * next tiles */
typedef struct {
  TiledLinear *linear;
  const TileShape *shape;
  long count, columns, width, height, panels, tiles;
  size_t scratch; /* bytes that a piece needs */
  int threads;
  _Atomic int failed;
} TilePieces;

static TileTask tile_task_of(const TilePieces *p, long n) {
  long panel = n % p->columns * p->width, tile = n / p->columns * p->height;
  return (TileTask){panel, p->panels - panel < p->width ? p->panels - panel : p->width, tile,
                    p->tiles - tile < p->height ? p->tiles - tile : p->height};
}

/* piece n of a call; scratch: four tiles per step */
static void tile_task(const TilePieces *p, long n, char *scratch) {
  const TiledLinear *t = p->linear;
  TileTask task = tile_task_of(p, n);
  long panel = task.panel, end = panel + task.panels, blocks = (task.tiles + 1) / 2, step = t->gated ? 1 : 2;
  long apart = t->gated ? t->outputs / 2 / TILE_ROWS : 1, size = TILE_ROWS * t->row_bytes;
  for (; panel < end; panel += step) {
    int two = t->gated || panel + 1 < end;
    Fetch fetch = {.pace = (int)((TILE_ROWS + blocks - 1) / blocks)};
    long soon = panel + step;
    if (soon >= end) {
      long next = piece_after(n, p->count);
      if (next < 0) fetch.pace = 0;
      else soon = tile_task_of(p, next).panel;
    }
    fetch.soon[0] = t->weight + soon * size, fetch.soon[1] = fetch.soon[0] + apart * size;
    Side w[2];
    for (int i = 0; i <= two; i++)
      w[i] = (t->tiled ? tiled_panel : t->many ? transposed_panel : panel_of)(t, panel + i * apart,
                                                                        scratch + i * 2 * t->steps * TILE_SIZE);
    for (long tile = task.tile, last = tile + task.tiles; tile < last; tile += 2) {
      tile_pair(t, w, panel, 1 + two, tile, tile + 1 < last ? 2 : 1, &fetch);
      for (int i = 0; i < 2; i++) fetch.soon[i] += fetch.pace * 64 * t->steps;
    }
  }
}

enum { CACHED = 5 << 18 };

static void tile_shape(TiledLinear *t, TileShape *shape) {
  for (int n = 0; n < 2; n++) {
    long left = t->rows - n * TILE_ROWS;
    int few = t->rows <= 2 * TILE_ROWS && left > 0 && left < TILE_ROWS && (t->tiled || !t->many);
    t->columns[n] = few ? (int)left : TILE_ROWS;
  }
  for (int n = 0; n < 8; n++) { /* sums of the first and second right side, the left sides, the right sides */
    int x_rows = t->many && n < 6 ? t->columns[n % 2] : TILE_ROWS;
    int x_columns = t->many || n == 4 || n == 5 ? TILE_ROWS : t->columns[n < 4 ? n / 2 : n - 6];
    shape->rows[n] = (uint8_t)x_rows, shape->bytes[n] = (uint16_t)(x_columns * 4);
  }
}

static __thread const TileShape *begun_tiles; /* of the call under way, in this thread */

static void end_tiles(void) {
  begun_tiles = NULL;
  tiles_end();
}

static void tile_piece(void *work, long n) {
  TilePieces *p = work;
  char *scratch = scratch_for(SCRATCH_PANELS, p->scratch);
  if (!scratch) {
    p->failed = 1;
    return;
  }
  if (begun_tiles != p->shape) { /* once for all pieces of a call */
    tiles_begin(p->shape);
    begun_tiles = p->shape, mine.leave = end_tiles;
  }
  tile_task(p, n, scratch);
}

static void ready_rows(const void *work, long first, long count) {
  TilePieces *p = (TilePieces *)work;
  float *scratch = scratch_for(SCRATCH_PANELS, p->scratch);
  if (!scratch) p->failed = 1;
  for (long r = first; scratch && r < first + count; r++) ready_row(p->linear, r, scratch);
}

static void bytes_rows(const void *work, long first, long count) {
  const TiledLinear *t = ((const TilePieces *)work)->linear;
  for (long r = first; r < first + count; r++) tile_bytes(t, r, t->x + r * t->inputs);
}

static void ready_tiles(const void *work, long first, long count) {
  const TiledLinear *t = ((const TilePieces *)work)->linear;
  for (long n = first; n < first + count; n++) ready_transposed(t, n / t->steps, n % t->steps);
}

/* converts x to tiles */
static void make_ready(const TilePieces *p, long lines) {
  const TiledLinear *t = p->linear;
  if (t->many) {
    share_rows(p->threads, lines, t->inputs, ready_rows, p);
    return;
  }
  if (t->bytes) share_rows(p->threads, t->rows, t->inputs, bytes_rows, p);
  share_rows(p->threads, p->tiles * t->steps, TILE_ROWS * 32, ready_tiles, p);
}

/* Returns 0, or 1 if memory ran out. */
static int linear_tiled(TiledLinear *t, int threads) {
  if (t->rows < 1) return 0;
  TileShape shape = {.palette = 1};
  long tiles = (t->rows + TILE_ROWS - 1) / TILE_ROWS, panels = (t->outputs + TILE_ROWS - 1) / TILE_ROWS;
  if (t->gated) panels /= 2;
  t->steps = (t->row_bytes + TILE_BYTES - 1) / TILE_BYTES, t->many = t->tiled || tiles >= MANY_TILES;
  tile_shape(t, &shape);
  if (!t->is_ready) t->ready = scratch_for(SCRATCH_TILES, tiles * t->steps * TILE_SIZE);
  if (!t->ready) return 1;
  long lines = t->rows <= 2 * TILE_ROWS && t->tiled ? t->rows : tiles * TILE_ROWS; /* of x, with padding */
  long height = CACHED / (t->steps * TILE_SIZE) / 2 * 2; /* tiles of x in a piece: they stay in the L2 cache */
  height = height < 4 ? 4 : height > 32 ? 32 : height;
  long blocks = (tiles + height - 1) / height;
  height = (tiles + 2 * blocks - 1) / (2 * blocks) * 2; /* of equal size, without a small one at the end */
  long width = panels / (threads * 8) / 2 * 2, most = tiles > 2 ? 8 : 96;
  width = width > most ? most : width < 2 ? (panels < threads * 4 && (t->tiled || !t->many) ? 1 : 2) : width;
  long columns = (panels + width - 1) / width;
  TilePieces pieces = {.linear = t, .shape = &shape, .count = blocks * columns, .columns = columns, .width = width,
                       .height = height, .panels = panels, .tiles = tiles, .threads = threads};
  pieces.scratch = 4 * t->steps * TILE_SIZE; /* two panels and their transposes; or a row of x in float32 */
  if (!t->is_ready) make_ready(&pieces, lines);
  if (!pieces.failed) share(threads, pieces.count, tile_piece, &pieces);
  return pieces.failed;
}

#endif

typedef struct {
  char *weight;
  long row_bytes;
  _Atomic int failed;
} Panels;

static void panel_piece(void *work, long n) {
  Panels *p = work;
  long size = TILE_ROWS * p->row_bytes;
  char *panel = p->weight + n * size, *scratch = scratch_for(SCRATCH_PANELS, size);
  if (!scratch) {
    p->failed = 1;
    return;
  }
  memcpy(scratch, panel, size);
  for (long byte = 0; byte < p->row_bytes; byte += TILE_BYTES)
    transpose16((uint32_t *)(panel + byte * TILE_ROWS), scratch + byte, p->row_bytes);
}

/* Tiles a matrix in place; rows: a multiple of 16, row_bytes: of 64. Returns 0, or 1 if memory ran out. */
static int tile_in_place(char *weight, long rows, long row_bytes, int threads) {
  Panels panels = {.weight = weight, .row_bytes = row_bytes};
  share(threads, rows / TILE_ROWS, panel_piece, &panels);
  return panels.failed;
}

/* a row of a tiled matrix */
static void tiled_row(void *to, const char *weight, long row, long row_bytes) {
  const char *from = weight + (row - row % 16) * row_bytes + row % 16 * 4;
  for (long n = 0; n < row_bytes / 4; n++, from += 64) memcpy((char *)to + n * 4, from, 4);
}
