/* Linear layers with weights in blocks of 32 inputs: 4 bits, or 8 bits beside them. Part of native.c.
 *
 *     weight = integer x scale of its block + offset of its group of blocks
 *     4 bits   integers from 0 to 15, with offsets
 *     8 bits   integers from -128 to 127, without
 *
 * That is what GGUF files hold, and others are brought to it. Weights stay so in memory; registers hold them unpacked.
 * Rows of x are rounded to 8-bit integers with a scale for each block first, so that products within a block are sums
 * of integers, which are exact:
 *
 *     result = sum over blocks of (scale of w x scale of x x sum of products) + sum over groups of (offset x sum of x)
 *
 * A panel is LANES outputs: lane n of a vector belongs to output n, and inputs are broadcast. A line of a panel is four
 * bytes of each of its outputs, and the lines of a block follow each other:
 *
 *     4 bits   line r: inputs 4 r to 4 r + 3 in the low bits, 16 + 4 r to 19 + 4 r in the others; 4 lines
 *     8 bits   line r: inputs 4 r to 4 r + 3; 8 lines
 *
 * Every sum runs over the blocks and then over the groups from left to right in one lane, the same for every tile. */

enum { BLOCK = 32, HALF_BLOCK = 16, BLOCK_LINES = 4, LINE_BYTES = LANES * 4, MOST_PANELS = 4 };
enum { MANY_PANELS = LANES == 16 ? 2 : 1 }; /* of a tile of 3 or 4 rows */

typedef int8_t line_bytes __attribute__((vector_size(LINE_BYTES)));
typedef uint8_t packed_line __attribute__((vector_size(LINE_BYTES)));
typedef line_bytes loose_line __attribute__((aligned(1), may_alias));
typedef packed_line loose_packed __attribute__((aligned(1), may_alias));

/* half a block of x, of which four bytes at a time are broadcast */
#if defined(__ARM_FEATURE_DOTPROD)
typedef int8x16_t half_block;
INLINE half_block load_half(const int8_t *p) { return vld1q_s8(p); }
#else
typedef const int8_t *half_block;
INLINE half_block load_half(const int8_t *p) { return p; }
INLINE int32_t four_bytes(half_block x, int r) {
  int32_t found;
  memcpy(&found, x + 4 * r, 4);
  return found;
}
#endif

/* Sums of integers begin with block_start and end with block_value. x86 multiplies unsigned bytes by signed ones: with
 * its instruction for four of them, 128 is added to weights of 8 bits, and 128 times the sum of x is subtracted at the
 * start. On Arm, converting integers is slow: 1.5 x 2^23 as a float32 number, plus an integer as such, is that number
 * plus the integer. Without an instruction for four bytes, x86 adds the products of 4 bits in 16 bits: 16 x 15 x 127
 * fits. */
enum { MAGIC_BITS = 0x4b400000 };

INLINE ints block_start(int type, int32_t count) {
  (void)type, (void)count;
#if defined(__ARM_NEON)
  return MAGIC_BITS - (ints){0};
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return (type == BLOCKS8 ? -128 * count : 0) - (ints){0};
#else
  return (ints){0};
#endif
}

INLINE floats block_value(ints sums, int type) {
  (void)type;
#if defined(__ARM_NEON)
  return (floats)sums - (floats)(MAGIC_BITS - (ints){0});
#elif defined(__AVX512BW__) && !defined(__AVX512VNNI__)
  if (type == BLOCKS4) sums = (ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
  if (type == BLOCKS4) sums = (ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
#if !defined(__ARM_NEON)
  return __builtin_convertvector(sums, floats);
#endif
}

/* the upper four bits of every byte; x86 shifts no bytes */
INLINE line_bytes upper_bits(packed_line both) {
#if defined(__AVX512BW__)
  return (line_bytes)_mm512_and_si512(_mm512_srli_epi16((__m512i)both, 4), _mm512_set1_epi8(15));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (line_bytes)_mm256_and_si256(_mm256_srli_epi16((__m256i)both, 4), _mm256_set1_epi8(15));
#else
  return (line_bytes)(both >> 4);
#endif
}

/* adds the products of a line with bytes 4 r to 4 r + 3 of half a block of x */
INLINE ints add_line(ints sums, line_bytes w, half_block x, int r, int type) {
  (void)type;
#if defined(__AVX512VNNI__)
  __m512i line = type == BLOCKS8 ? _mm512_xor_si512((__m512i)w, _mm512_set1_epi8(-128)) : (__m512i)w;
  return (ints)_mm512_dpbusd_epi32((__m512i)sums, line, _mm512_set1_epi32(four_bytes(x, r)));
#elif defined(__AVX512BW__)
  __m512i given = _mm512_set1_epi32(four_bytes(x, r));
  if (type == BLOCKS4) return (ints)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)w, given));
  /* magnitudes of weights, of which 128 has no negative, by x with their signs: 2 x 128 x 127 fits into 16 bits */
  __mmask64 below = _mm512_movepi8_mask((__m512i)w);
  __m512i signed_x = _mm512_mask_sub_epi8(given, below, _mm512_setzero_si512(), given);
  __m512i pairs_of = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), signed_x);
  return sums + (ints)_mm512_madd_epi16(pairs_of, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__)
  __m256i line = type == BLOCKS8 ? _mm256_xor_si256((__m256i)w, _mm256_set1_epi8(-128)) : (__m256i)w;
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)sums, line, _mm256_set1_epi32(four_bytes(x, r)));
#elif defined(__AVX2__)
  __m256i given = _mm256_set1_epi32(four_bytes(x, r));
  if (type == BLOCKS4) return (ints)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)w, given));
  __m256i pairs_of = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8(given, (__m256i)w));
  return sums + (ints)_mm256_madd_epi16(pairs_of, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  if (r == 0) return (ints)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w, x, 0);
  if (r == 1) return (ints)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w, x, 1);
  if (r == 2) return (ints)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w, x, 2);
  return (ints)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)w, x, 3);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  int8x16_t given = vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(x, r)));
  int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8(given)));
  return sums + (ints)vpaddq_s32(low, vpaddlq_s16(vmull_high_s8((int8x16_t)w, given)));
#else
  for (int i = 0; i < LINE_BYTES; i++) sums[i / 4] += w[i] * x[4 * r + i % 4];
  return sums;
#endif
}

/* the arguments of a call, and what is derived from them */
typedef struct {
  const Matrix *m;
  const float *x;
  const float *residual; /* or NULL; may be out */
  float *out;
  long rows, blocks, groups, panels;
  float *x_scales;   /* [rows, blocks] */
  int32_t *x_counts; /* [rows, blocks]: sums of the rounded values */
  float *x_sums;     /* [rows, groups]: the same with their scales */
  int8_t *small;     /* [rows, blocks x BLOCK] */
} BlockLinear;

/* the results of one row and panel */
INLINE void block_end(const BlockLinear *t, floats sums, long row, long panel) {
  const Matrix *m = t->m;
  float values[LANES];
  long first = panel * LANES, index = row * m->outputs + first;
  long count = m->outputs - first < LANES ? m->outputs - first : LANES;
  if (count == LANES && !m->bias) {
    store(t->out + index, t->residual ? sums + load(t->residual + index) : sums);
    return;
  }
  store(values, sums);
  for (long n = 0; n < count; n++) {
    float value = values[n];
    if (m->bias) value += load_any(m->bias, first + n, m->bias_type);
    if (t->residual) value += t->residual[index + n];
    t->out[index + n] = value;
  }
}

/* adds the products of block b of a panel with some rows; x: their halves of the block */
INLINE void block_step(floats sums[][MOST_PANELS], const BlockLinear *t, half_block (*x)[2], long row, long panel,
                       int p, long b, int rows, int type, int scale_type) {
  long lines = type == BLOCKS4 ? BLOCK_LINES : 2 * BLOCK_LINES, at_block = panel * t->blocks + b;
  const char *w = (const char *)t->m->weight + at_block * lines * LINE_BYTES;
  floats scale = load_as(at(t->m->scales, at_block * LANES, scale_type), scale_type);
  ints found[DOT_ROWS];
#pragma GCC unroll 4
  for (int i = 0; i < rows; i++) found[i] = block_start(type, t->x_counts[(row + i) * t->blocks + b]);
#pragma GCC unroll 4
  for (int r = 0; r < BLOCK_LINES; r++) {
    line_bytes low, high;
    if (type == BLOCKS4) {
      packed_line both = *(const loose_packed *)(w + r * LINE_BYTES);
      low = (line_bytes)(both & 15), high = upper_bits(both);
    } else {
      low = *(const loose_line *)(w + r * LINE_BYTES);
      high = *(const loose_line *)(w + (BLOCK_LINES + r) * LINE_BYTES);
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
      found[i] = add_line(found[i], low, x[i][0], r, type);
      found[i] = add_line(found[i], high, x[i][1], r, type);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < rows; i++)
    sums[i][p] = fused(block_value(found[i], type), scale * all(t->x_scales[(row + i) * t->blocks + b]), sums[i][p]);
}

/* adds what groups contribute */
INLINE void block_groups(floats sums[][MOST_PANELS], const BlockLinear *t, long row, long panel, int rows, int panels,
                         int type) {
  for (long g = 0; g < t->groups; g++)
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
      floats offset = load_as(at(t->m->offsets, ((panel + p) * t->groups + g) * LANES, type), type);
#pragma GCC unroll 4
      for (int i = 0; i < rows; i++)
        sums[i][p] = fused(all(t->x_sums[(row + i) * t->groups + g]), offset, sums[i][p]);
    }
}

INLINE void block_tile(const BlockLinear *t, long row, long panel, int rows, int panels, int type, int scale_type) {
  floats sums[DOT_ROWS][MOST_PANELS];
#pragma GCC unroll 4
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) sums[i][p] = all(0);
  for (long b = 0; b < t->blocks; b++) {
    half_block x[DOT_ROWS][2];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
      const int8_t *from = t->small + ((row + i) * t->blocks + b) * BLOCK;
      x[i][0] = load_half(from), x[i][1] = load_half(from + HALF_BLOCK);
    }
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) block_step(sums, t, x, row, panel + p, p, b, rows, type, scale_type);
  }
  if (type == BLOCKS4 && t->m->offset_type == FLOAT32) block_groups(sums, t, row, panel, rows, panels, FLOAT32);
  if (type == BLOCKS4 && t->m->offset_type == FLOAT16) block_groups(sums, t, row, panel, rows, panels, FLOAT16);
#pragma GCC unroll 4
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) block_end(t, sums[i][p], row + i, panel + p);
}

/* one function for every tile and type: some panels at once, or one */
typedef void BlockTile(const BlockLinear *, long, long);
static const int tile_panels[DOT_ROWS] = {4, 2, MANY_PANELS, MANY_PANELS};
#define BLOCK_TILE(name, rows, panels, type, scale)                                                       \
  static void block_tile_##name##_##rows##_##type##_##scale(const BlockLinear *t, long row, long panel) { \
    block_tile(t, row, panel, rows, panels, type, scale);                                                 \
  }
#define BLOCK_TILES(type, scale)                                                                           \
  BLOCK_TILE(wide, 1, 4, type, scale) BLOCK_TILE(wide, 2, 2, type, scale)                                  \
  BLOCK_TILE(wide, 3, MANY_PANELS, type, scale) BLOCK_TILE(wide, 4, MANY_PANELS, type, scale)              \
  BLOCK_TILE(one, 1, 1, type, scale) BLOCK_TILE(one, 2, 1, type, scale)                                    \
  BLOCK_TILE(one, 3, 1, type, scale) BLOCK_TILE(one, 4, 1, type, scale)
#define BLOCK_NAMES(name, type, scale)                                                                     \
  {                                                                                                        \
    block_tile_##name##_1_##type##_##scale, block_tile_##name##_2_##type##_##scale,                        \
        block_tile_##name##_3_##type##_##scale, block_tile_##name##_4_##type##_##scale                     \
  }
#define BLOCK_TABLE(type, scale) {BLOCK_NAMES(one, type, scale), BLOCK_NAMES(wide, type, scale)}
BLOCK_TILES(BLOCKS4, FLOAT32) BLOCK_TILES(BLOCKS4, FLOAT16) BLOCK_TILES(BLOCKS8, FLOAT32) BLOCK_TILES(BLOCKS8, FLOAT16)
/* by type, type of scales, width and rows */
static BlockTile *const block_tiles[2][2][2][DOT_ROWS] = {
    {BLOCK_TABLE(BLOCKS4, FLOAT32), BLOCK_TABLE(BLOCKS4, FLOAT16)},
    {BLOCK_TABLE(BLOCKS8, FLOAT32), BLOCK_TABLE(BLOCKS8, FLOAT16)},
};

/* Rounds a block of x to the nearest of 255 steps between its largest magnitudes. Returns the sum of the integers. The
 * step is NaN if any value is. */
static int32_t quantize_block(int8_t *to, float *step, const float *x) {
  floats sizes = all(0), magic = all(12582912.0f); /* 1.5 x 2^23 puts the nearest integer in the low bits */
  ints broken = {0}, counts = {0};
  int32_t total = 0;
  for (int i = 0; i < BLOCK; i += LANES) {
    floats here = load(x + i), size = (floats)((ints)here & 0x7fffffff);
    sizes = choose(size > sizes, size, sizes);
    broken |= here != here;
  }
  float most = largest(sizes);
  for (int lane = 0; lane < LANES; lane++) most = broken[lane] ? NAN : most;
  float inverse = most > 1e-30f ? 127.0f / most : 0;
  for (int i = 0; i < BLOCK; i += LANES) {
    ints rounded = (ints)(load(x + i) * all(inverse) + magic) - (ints)magic;
    counts += rounded;
    store_small(to + i, rounded);
  }
  for (int lane = 0; lane < LANES; lane++) total += counts[lane];
  *step = most / 127.0f;
  return total;
}

static void quantize_block_rows(const void *work, long first, long count) {
  const BlockLinear *t = work;
  long inputs = t->m->inputs;
  for (long row = first; row < first + count; row++) {
    const float *x = t->x + row * inputs;
    float *sums = t->x_sums + row * t->groups;
    memset(sums, 0, t->groups * sizeof(float));
    for (long b = 0, n = row * t->blocks; b < t->blocks; b++, n++) {
      t->x_counts[n] = quantize_block(t->small + n * BLOCK, t->x_scales + n, x + b * BLOCK);
      sums[b * BLOCK / t->m->group] += (float)t->x_counts[n] * t->x_scales[n];
    }
  }
}

/* the pieces of a call: ranges of panels by blocks of rows */
typedef struct {
  BlockLinear linear;
  long row_blocks, width;
} BlockPieces;

static void block_piece(void *work, long n) {
  const BlockPieces *p = work;
  const BlockLinear *t = &p->linear;
  BlockTile *const(*tiles)[DOT_ROWS] = block_tiles[t->m->type - BLOCKS4][t->m->scale_type == FLOAT16];
  long first = n % p->row_blocks * LINE_BLOCK, last = first + LINE_BLOCK < t->rows ? first + LINE_BLOCK : t->rows;
  long panel = n / p->row_blocks * p->width, end = panel + p->width < t->panels ? panel + p->width : t->panels;
  long most = tile_panels[(last - first < DOT_ROWS ? last - first : DOT_ROWS) - 1];
  while (panel < end) { /* these panels stay in the L1 cache while all rows are multiplied */
    long wide = panel + most <= end ? most : 1;
    for (long row = first; row < last; row += DOT_ROWS) {
      unsigned rows = (unsigned)(last - row < DOT_ROWS ? last - row : DOT_ROWS) - 1;
      int at_once = tile_panels[rows % DOT_ROWS];
      for (long done = 0; done < wide; done += wide % at_once ? 1 : at_once)
        tiles[wide % at_once == 0][rows % DOT_ROWS](t, row, panel + done);
    }
    panel += wide;
  }
}

/* Weights as described above; inputs are whole blocks. Returns 0, or 1 if memory ran out. */
API int shoal_linear_blocks(float *out, const float *x, const Matrix *m, const float *residual, long rows,
                            int threads) {
  if (rows < 1) return 0;
  BlockLinear t = {.m = m, .x = x, .residual = residual, .out = out, .rows = rows, .blocks = m->inputs / BLOCK,
                   .groups = (m->inputs + m->group - 1) / m->group, .panels = (m->outputs + LANES - 1) / LANES};
  long numbers = rows * (2 * t.blocks + t.groups);
  t.x_scales = scratch_for(SCRATCH_ROWS, numbers * sizeof(float) + rows * m->inputs);
  if (!t.x_scales) return 1;
  t.x_sums = t.x_scales + rows * t.blocks, t.x_counts = (int32_t *)(t.x_sums + rows * t.groups);
  t.small = (int8_t *)(t.x_scales + numbers);
  share_rows(threads, rows, m->inputs, quantize_block_rows, &t);
  int few = rows <= DOT_ROWS;
  long width = t.panels / (threads * (few ? 4 : 8)) / 4 * 4, most = (few ? 768 : 192) / LANES;
  width = width < 4 ? 4 : width > most ? most : width;
  BlockPieces pieces = {.linear = t, .row_blocks = (rows + LINE_BLOCK - 1) / LINE_BLOCK, .width = width};
  share(threads, pieces.row_blocks * ((t.panels + width - 1) / width), block_piece, &pieces);
  return 0;
}
