/* Linear layers in tiles of 16 by 16: Intel's AMX, for bfloat16 and for 8-bit weights. A part of native.c.
 *
 * Computes the transpose, out' = W x': 16 rows of W by 64 bytes of them, as they lie in memory, are one side of a product,
 * so weights need no second copy. The other side, x, is small: it is rounded to bfloat16 (or is bytes already), turned
 * so that groups of four bytes of 16 rows of x lie beside each other, and filled up with zeros.
 *
 *      W: 16 outputs x 64 bytes        x': 16 groups of 4 bytes x 16 rows of x        sums: 16 outputs x 16 rows of x
 *
 * Every sum runs over the inputs from left to right in one accumulator, so neighbours change no bit. The instructions take
 * tiny numbers (denormals) for 0, whatever the process has set.
 *
 * SHOAL_PRETEND_TILES computes the tiles in plain C: for tests on machines without them. */

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES 1
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
/* The compiler's own names for these say nothing of the memory they read. */
#define tile_zero(n) __asm__ volatile("tilezero %%tmm" #n ::)
#define tile_load(n, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #n ::"r"(from), "r"((long)(stride)) : "memory")
#define tile_store(n, to, stride) \
  __asm__ volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
#define tile_add_bfloat16(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)
#define tile_add_int8(sums, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)
#define tiles_begin(shape) __asm__ volatile("ldtilecfg (%0)" ::"r"(shape) : "memory")
#define tiles_end() __asm__ volatile("tilerelease" ::)

/* Linux lends the tiles' registers to processes that ask. 0: it does. */
static int tiles_permitted(void) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? errno : 0;
}
#elif defined(SHOAL_PRETEND_TILES)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#if HAS_TILES

enum { TILE_ROWS = 16, TILE_BYTES = 64, TILE_SIZE = TILE_ROWS * TILE_BYTES, ROWS_AT_ONCE = 2 * TILE_ROWS };

/* as ldtilecfg reads it */
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
#define tile_store(n, to, stride) pretend_store(n, (char *)(to), stride)
#define tile_add_bfloat16(sums, a, b) pretend_bfloat16(sums, a, b)
#define tile_add_int8(sums, a, b) pretend_int8(sums, a, b)
#define tiles_begin(shape) (pretended_shape = *(shape))
#define tiles_end() ((void)0)
static int tiles_permitted(void) { return 0; }
#endif

/* 16 rows of 16 words, rows and columns exchanged */
static void turn16(uint32_t *to, const uint32_t *from) {
#if defined(__AVX512F__)
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * 16);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2)
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  /* now a[4 q + j] holds, in its lane l, column 4 l + j of rows 4 q to 4 q + 3 */
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    __m512i high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    __m512i high_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_si512(to + j * 16, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(to + (4 + j) * 16, _mm512_shuffle_i32x4(odd, high_odd, 0x88));
    _mm512_storeu_si512(to + (8 + j) * 16, _mm512_shuffle_i32x4(low, high, 0xdd));
    _mm512_storeu_si512(to + (12 + j) * 16, _mm512_shuffle_i32x4(odd, high_odd, 0xdd));
  }
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[j * 16 + i] = from[i * 16 + j];
#endif
}

/* [rows, columns] words to [columns, rows] */
static void turn_words(uint32_t *to, const uint32_t *from, long rows, long columns) {
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < columns; j++) to[j * rows + i] = from[i * columns + j];
}

/* the work of a call */
typedef struct {
  const char *weight;
  long row_bytes, row_stride, step_bytes, panel_bytes; /* of weights: a row, and from one row, tile, panel to the next */
  const float *x;                                      /* [rows, inputs], or none: then */
  const int8_t *bytes;                                 /* [rows, row_bytes], with scales */
  const float *x_scales, *scales;
  const void *bias;      /* or none */
  const float *residual; /* or none; may be out */
  float *out;
  long rows, inputs, outputs, steps;
  int bias_type;
  int columns[2]; /* of the first and the second tile of x: less than 16 only where there are no more rows */
  char *turned;   /* x: for each 16 rows, steps of 16 groups of columns of 4 bytes */
} Tiled;

/* 16 rows of weights */
typedef struct {
  const char *tiles;
  long stride, step;
  const char *last; /* the last tile where it is not whole, filled up; or none */
} Panel;

static int tile_prefetch = 1; /* 0: leave it to the CPU. 1: into the second cache. 2: into the first. */

/* one step of up to 16 rows of x, turned */
static void turn_step(const Tiled *t, long tile, long step) {
  uint32_t lines[TILE_SIZE / 4];
  int columns = t->columns[tile % 2];
  long first = tile * TILE_ROWS, rows = t->rows - first < columns ? t->rows - first : columns;
  uint32_t *to = (uint32_t *)(t->turned + tile * t->steps * TILE_SIZE + step * columns * 64);
  if (rows < columns) memset(lines, 0, TILE_SIZE);
  for (long i = 0; i < rows; i++) {
    uint16_t *line = (uint16_t *)(lines + i * 16);
    if (t->bytes) {
      memcpy(line, t->bytes + (first + i) * t->row_bytes + step * TILE_BYTES, TILE_BYTES);
      continue;
    }
    const float *from = t->x + (first + i) * t->inputs + step * 32;
    long n = t->inputs - step * 32 < 32 ? t->inputs - step * 32 : 32, k = 0;
    for (; k + LANES <= n; k += LANES) store_as(line + k, load(from + k), BFLOAT16);
    for (; k < n; k++) store_one(line + k, from[k], BFLOAT16);
    for (; k < 32; k++) line[k] = 0;
  }
  if (columns == TILE_ROWS)
    turn16(to, lines);
  else
    turn_words(to, lines, columns, 16);
}

static void copy_tile(char *to, const char *from, long stride, long rows, long bytes) {
  memset(to, 0, TILE_SIZE);
  for (long r = 0; r < rows; r++) memcpy(to + r * TILE_BYTES, from + r * stride, bytes);
}

/* `room`: a tile for every step */
static Panel panel_of(const Tiled *t, long n, char *room) {
  Panel found = {t->weight + n * t->panel_bytes, t->row_stride, t->step_bytes, NULL};
  long rows = t->outputs - n * TILE_ROWS, rest = t->row_bytes % TILE_BYTES;
  if (t->step_bytes == TILE_SIZE || (rows >= TILE_ROWS && !rest)) return found;
  long first = rows < TILE_ROWS ? 0 : t->steps - 1;
  for (long s = first; s < t->steps; s++)
    copy_tile(room + s * TILE_SIZE, found.tiles + s * TILE_BYTES, t->row_stride, rows < TILE_ROWS ? rows : TILE_ROWS,
              s == t->steps - 1 && rest ? rest : TILE_BYTES);
  if (first) found.last = room + first * TILE_SIZE;
  if (!first) found.tiles = room, found.stride = TILE_BYTES, found.step = TILE_SIZE;
  return found;
}

INLINE void tile_step(const char *const *w, const long *w_stride, const char *const *x, const long *x_stride,
                      int panels, int columns, int bytes) {
#define TILE_ADD(sums, a, b)                \
  do {                                      \
    if (bytes) tile_add_int8(sums, a, b);   \
    if (!bytes) tile_add_bfloat16(sums, a, b); \
  } while (0)
  tile_load(6, x[0], x_stride[0]);
  tile_load(4, w[0], w_stride[0]);
  TILE_ADD(0, 4, 6);
  if (panels > 1) {
    tile_load(5, w[1], w_stride[1]);
    TILE_ADD(1, 5, 6);
  }
  if (columns > 1) {
    tile_load(7, x[1], x_stride[1]);
    TILE_ADD(2, 4, 7);
    if (panels > 1) TILE_ADD(3, 5, 7);
  }
#undef TILE_ADD
}

/* `panels` panels of weights by `columns` tiles of x, into [columns][panels][16 outputs, rows of x] */
INLINE void tile_block(const Tiled *t, const Panel *panel, long tile, int panels, int columns, int bytes, float *found,
                       const char *soon, int pace) {
  const char *w[2], *x[2];
  long w_stride[2], x_stride[2];
  for (int n = 0; n < panels; n++) w[n] = panel[n].tiles, w_stride[n] = panel[n].stride;
  for (int n = 0; n < columns; n++)
    x[n] = t->turned + (tile + n) * t->steps * TILE_SIZE, x_stride[n] = t->columns[n] * 4;
  tile_zero(0);
  if (panels > 1) tile_zero(1);
  if (columns > 1) tile_zero(2);
  if (columns > 1 && panels > 1) tile_zero(3);
  long whole = panel[0].last || panel[panels - 1].last ? t->steps - 1 : t->steps;
  for (long s = 0; s < whole; s++) {
    if (tile_prefetch == 1)
      for (int n = 0; n < pace; n++, soon += 64) __builtin_prefetch(soon, 0, 2);
    else if (tile_prefetch == 2)
      for (int n = 0; n < pace; n++, soon += 64) __builtin_prefetch(soon, 0, 3);
    tile_step(w, w_stride, x, x_stride, panels, columns, bytes);
    for (int n = 0; n < panels; n++) w[n] += panel[n].step;
    for (int n = 0; n < columns; n++) x[n] += x_stride[n] * 16;
  }
  if (whole < t->steps) {
    for (int n = 0; n < panels; n++)
      if (panel[n].last) w[n] = panel[n].last, w_stride[n] = TILE_BYTES;
    tile_step(w, w_stride, x, x_stride, panels, columns, bytes);
  }
  tile_store(0, found, x_stride[0]);
  if (panels > 1) tile_store(1, found + 256, x_stride[0]);
  if (columns > 1) tile_store(2, found + 256 * panels, x_stride[1]);
  if (columns > 1 && panels > 1) tile_store(3, found + 256 * 3, x_stride[1]);
}

typedef void TileBlock(const Tiled *, const Panel *, long, float *, const char *, int);
#define TILE_BLOCK(panels, columns, bytes)                                                                       \
  static void tile_block_##panels##_##columns##_##bytes(const Tiled *t, const Panel *p, long tile, float *found, \
                                                        const char *soon, int pace) {                            \
    tile_block(t, p, tile, panels, columns, bytes, found, soon, pace);                                           \
  }
TILE_BLOCK(1, 1, 0) TILE_BLOCK(1, 2, 0) TILE_BLOCK(2, 1, 0) TILE_BLOCK(2, 2, 0)
TILE_BLOCK(1, 1, 1) TILE_BLOCK(1, 2, 1) TILE_BLOCK(2, 1, 1) TILE_BLOCK(2, 2, 1)
static TileBlock *const tile_blocks[2][2][2] = {
    {{tile_block_1_1_0, tile_block_1_2_0}, {tile_block_2_1_0, tile_block_2_2_0}},
    {{tile_block_1_1_1, tile_block_1_2_1}, {tile_block_2_1_1, tile_block_2_2_1}},
};

/* one row of x: `count` of 16 outputs from `first` on */
INLINE void tile_row(const Tiled *t, const uint32_t *sums, const float *bias, long row, long first, long count) {
  float value[TILE_ROWS], more[TILE_ROWS];
  float *to = t->out + row * t->outputs + first;
  memcpy(value, sums, sizeof(float) * count);
  if (t->bytes) {
    int32_t counts[TILE_ROWS];
    memcpy(counts, sums, sizeof(float) * count);
    for (long i = 0; i < count; i++) value[i] = (float)counts[i] * t->x_scales[row] * t->scales[first + i];
  }
  if (t->bias)
    for (long i = 0; i < count; i++) value[i] += bias[i];
  if (t->residual) {
    memcpy(more, t->residual + row * t->outputs + first, sizeof(float) * count);
    for (long i = 0; i < count; i++) value[i] += more[i];
  }
  memcpy(to, value, sizeof(float) * count);
}

/* what a tile of sums [16 outputs, rows of x] is for */
static void tile_end(const Tiled *t, const float *sums, long panel, long tile) {
  uint32_t turned[TILE_SIZE / 4];
  float bias[TILE_ROWS];
  int columns = t->columns[tile % 2];
  long row = tile * TILE_ROWS, rows = t->rows - row < columns ? t->rows - row : columns;
  long first = panel * TILE_ROWS, count = t->outputs - first < TILE_ROWS ? t->outputs - first : TILE_ROWS;
  if (t->bias)
    for (long i = 0; i < count; i++) bias[i] = load_any(t->bias, first + i, t->bias_type);
  if (columns == TILE_ROWS)
    turn16(turned, (const uint32_t *)sums);
  else
    turn_words(turned, (const uint32_t *)sums, TILE_ROWS, columns);
  for (long i = 0; i < rows; i++)
    if (count == TILE_ROWS)
      tile_row(t, turned + i * TILE_ROWS, bias, row + i, first, TILE_ROWS);
    else
      tile_row(t, turned + i * TILE_ROWS, bias, row + i, first, count);
}

/* some panels by some tiles of x */
static void tile_task(const Tiled *t, long panel, long panels, long tile, long tiles, char *room) {
  float found[4 * 256] __attribute__((aligned(64)));
  long end = panel + panels, blocks = (tiles + 1) / 2;
  int pace = (int)((ROWS_AT_ONCE + blocks - 1) / blocks);
  for (; panel < end; panel += 2) {
    int two = panel + 1 < end;
    Panel w[2] = {panel_of(t, panel, room)};
    if (two) w[1] = panel_of(t, panel + 1, room + t->steps * TILE_SIZE);
    const char *soon = t->weight + (panel + 2) * t->panel_bytes;
    for (long n = tile; n < tile + tiles; n += 2) {
      int both = n + 1 < tile + tiles;
      tile_blocks[t->bytes != NULL][two][both](t, w, n, found, soon, pace);
      soon += pace * 64 * t->steps;
      for (int c = 0; c <= both; c++)
        for (int p = 0; p <= two; p++) tile_end(t, found + 256 * (c * (1 + two) + p), panel + p, n + c);
    }
  }
}

enum { FEW_VALUES = 1 << 13, TILES_PER_TASK = 16 };

/* 0: done. 1: no memory. */
static int tiled(Tiled *t, int threads) {
  long tiles = (t->rows + TILE_ROWS - 1) / TILE_ROWS, panels = (t->outputs + TILE_ROWS - 1) / TILE_ROWS;
  t->steps = (t->row_bytes + TILE_BYTES - 1) / TILE_BYTES;
  for (int n = 0; n < 2; n++) {
    long left = t->rows - n * TILE_ROWS;
    t->columns[n] = t->rows <= ROWS_AT_ONCE && left > 0 && left < TILE_ROWS ? (int)left : TILE_ROWS;
  }
  TileShape shape = {.palette = 1};
  for (int n = 0; n < 8; n++) /* sums of the first and the second rows of x, weights, x */
    shape.rows[n] = TILE_ROWS,
    shape.bytes[n] = (uint16_t)(n < 4 ? t->columns[n / 2] * 4 : n < 6 ? TILE_BYTES : t->columns[n - 6] * 4);
  t->turned = room_for(ROOM_TILES, tiles * t->steps * TILE_SIZE);
  if (!t->turned) return 1;
  int few = t->rows * t->inputs <= FEW_VALUES; /* sooner done than shared */
  if (few)
    for (long n = 0; n < tiles * t->steps; n++) turn_step(t, n / t->steps, n % t->steps);
  long blocks = (tiles + TILES_PER_TASK - 1) / TILES_PER_TASK;
  long width = panels / (threads * (blocks > 1 ? 8 : 4)) / 2 * 2, most = tiles > 2 ? 8 : 24;
  width = width > most ? most : width < 2 ? (panels < threads * 4 ? 1 : 2) : width;
  long tasks = (panels + width - 1) / width;
  int edges = t->step_bytes != TILE_SIZE && (t->outputs % TILE_ROWS || t->row_bytes % TILE_BYTES), failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
  {
    char *room = edges ? aligned_alloc(64, 2 * t->steps * TILE_SIZE) : NULL;
    failed = edges && !room;
    if (!few)
#pragma omp for schedule(static)
      for (long n = 0; n < tiles * t->steps; n++) turn_step(t, n / t->steps, n % t->steps);
    tiles_begin(&shape);
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < blocks * tasks; task++) {
      long tile = task % blocks * TILES_PER_TASK, first = task / blocks * width;
      if (failed) continue;
      tile_task(t, first, panels - first < width ? panels - first : width, tile,
                tiles - tile < TILES_PER_TASK ? tiles - tile : TILES_PER_TASK, room);
    }
    tiles_end();
    free(room);
  }
  return failed;
}

static int tiled_bfloat16(float *out, const float *x, const void *weight, int packed, const void *bias,
                          const float *residual, long rows, long inputs, long outputs, int threads) {
  long steps = (inputs + 31) / 32;
  Tiled t = {.weight = weight, .row_bytes = inputs * 2, .row_stride = inputs * 2, .step_bytes = TILE_BYTES,
             .panel_bytes = TILE_ROWS * inputs * 2, .x = x, .bias = bias, .bias_type = BFLOAT16, .residual = residual,
             .out = out, .rows = rows, .inputs = inputs, .outputs = outputs};
  if (packed) t.row_stride = TILE_BYTES, t.step_bytes = TILE_SIZE, t.panel_bytes = steps * TILE_SIZE;
  return tiled(&t, threads);
}

static int tiled_int8(float *out, const int8_t *x, const float *x_scales, const int8_t *weight, const float *scales,
                      const void *bias, int bias_type, const float *residual, long rows, long inputs, long outputs,
                      int threads) {
  Tiled t = {.weight = (const char *)weight, .row_bytes = inputs, .row_stride = inputs, .step_bytes = TILE_BYTES,
             .panel_bytes = TILE_ROWS * inputs, .bytes = x, .x_scales = x_scales, .scales = scales, .bias = bias,
             .bias_type = bias_type, .residual = residual, .out = out, .rows = rows, .inputs = inputs,
             .outputs = outputs};
  return tiled(&t, threads);
}

#else
static int tiles_permitted(void) { return 0; }
#endif
