/* The CPU kernels: linear layers, ragged paged attention, norms, rotation with KV writes, SwiGLU, choosing tokens.
 *
 * Plain C with vectors of the compiler's own (gcc, clang), so one text serves NEON, AVX2, AVX-512 and machines without
 * any of them: compile it with the flags of the machine. The meaning of every function is that of kernels/ref.py.
 *
 * Two rules hold throughout:
 * - No result depends on the neighbours. Every sum runs in an order that its own row fixes, whatever the tile it is
 *   computed in, the number of rows or of threads. So a request says the same whoever shares its pass.
 * - Nothing outside a sequence's own tokens is read, so garbage in the rest of a KV block cannot come out.
 *
 * Activations are float32. Weights and KV are float32, bfloat16 or (where the compiler knows it) float16.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

/* ---------------------------------------------------------------- vectors */

#if defined(__AVX512F__)
enum { LANES = 16, DOT_COLUMNS = 6, MIX_VECTORS = 4 };
#elif defined(__AVX2__)
enum { LANES = 8, DOT_COLUMNS = 3, MIX_VECTORS = 2 };
#else
enum { LANES = 4, DOT_COLUMNS = 6, MIX_VECTORS = 4 };
#endif
enum { DOT_ROWS = 4, LINE = 16 }; /* LINE: floats in a cache line */

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
/* the same wherever they lie in memory */
typedef floats loose_floats __attribute__((aligned(4), may_alias));
typedef halves loose_halves __attribute__((aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define API __attribute__((visibility("default")))

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
#ifdef __FLT16_MAX__
#define HAS_FLOAT16 1
typedef _Float16 narrow __attribute__((vector_size(LANES * 2)));
typedef narrow loose_narrow __attribute__((aligned(2), may_alias));
#else
#define HAS_FLOAT16 0
#endif

INLINE size_t size_of(int type) { return type == FLOAT32 ? 4 : 2; }

INLINE const void *at(const void *p, long i, int type) { return (const char *)p + i * (long)size_of(type); }

INLINE floats load(const float *p) { return *(const loose_floats *)p; }
INLINE void store(float *p, floats x) { *(loose_floats *)p = x; }
INLINE floats all(float x) { return x - (floats){0}; }

/* a b + c, rounded once where the CPU can do that in one instruction, and then everywhere: the compiler is told not to choose
 * (-ffp-contract=off), since it would choose differently for different tile sizes */
INLINE floats fused(floats a, floats b, floats c) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

INLINE float fused_one(float a, float b, float c) {
#if defined(__aarch64__) || defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

/* LANES values of a type, as float32 */
INLINE floats load_as(const void *p, int type) {
  if (type == FLOAT32) return load(p);
  if (type == BFLOAT16) return (floats)(__builtin_convertvector(*(const loose_halves *)p, words) << 16);
#if HAS_FLOAT16 && defined(__AVX512F__) /* gcc would do it number by number, and take seconds to compile that */
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif HAS_FLOAT16 && defined(__AVX2__) && defined(__F16C__)
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128(p));
#elif HAS_FLOAT16 && defined(__ARM_NEON) && defined(__aarch64__)
  return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#elif HAS_FLOAT16
  return __builtin_convertvector(*(const loose_narrow *)p, floats);
#else
  return all(0);
#endif
}

/* LINE values of a type, as float32 */
INLINE void load_line(floats *out, const void *p, int type) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  if (type == BFLOAT16) { /* two instructions for eight values, where the general way takes six */
    uint16x8_t a = vld1q_u16(p), b = vld1q_u16((const uint16_t *)p + 8);
    out[0] = (floats)vshll_n_u16(vget_low_u16(a), 16), out[1] = (floats)vshll_high_n_u16(a, 16);
    out[2] = (floats)vshll_n_u16(vget_low_u16(b), 16), out[3] = (floats)vshll_high_n_u16(b, 16);
    return;
  }
#endif
#pragma GCC unroll 4
  for (int n = 0; n < LINE / LANES; n++) out[n] = load_as(at(p, n * LANES, type), type);
}

INLINE float load_one(const void *p, int type) {
  if (type == FLOAT32) return *(const float *)p;
  if (type == BFLOAT16) {
    uint32_t word = (uint32_t)*(const uint16_t *)p << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
  }
#if HAS_FLOAT16
  return (float)*(const _Float16 *)p;
#else
  return 0;
#endif
}

/* to the nearest, ties to even; a NaN stays one */
INLINE void store_as(void *p, floats x, int type) {
  if (type == FLOAT32) {
    store(p, x);
  } else if (type == BFLOAT16) {
    words bits = (words)x;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words broken = (words)(x != x);
    *(loose_halves *)p = __builtin_convertvector((rounded & ~broken) | (broken & 0x7fc0), halves);
  }
#if HAS_FLOAT16
  else {
    *(loose_narrow *)p = __builtin_convertvector(x, narrow);
  }
#endif
}

INLINE void store_one(void *p, float x, int type) {
  if (type == FLOAT32) {
    *(float *)p = x;
  } else if (type == BFLOAT16) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *(uint16_t *)p = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
#if HAS_FLOAT16
  else {
    *(_Float16 *)p = (_Float16)x;
  }
#endif
}

#if defined(__AVX2__)
/* halves onto each other until four are left */
INLINE __m128 folded(floats x) {
#if defined(__AVX512F__)
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
  __m256 half = (__m256)x;
#endif
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#endif

/* all lanes, added in one fixed order: halves onto each other, then neighbours */
INLINE float sum(floats x) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  float32x4_t two = vpaddq_f32((float32x4_t)x, (float32x4_t)x);
  return vgetq_lane_f32(vpaddq_f32(two, two), 0);
#elif defined(__AVX2__)
  __m128 two = _mm_hadd_ps(folded(x), folded(x));
  return _mm_cvtss_f32(_mm_hadd_ps(two, two));
#else
  float v[LANES];
  store(v, x);
  for (int width = LANES / 2; width >= 4; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return (v[0] + v[1]) + (v[2] + v[3]);
#endif
}

/* sums of four vectors */
INLINE void sum4(float *out, floats a, floats b, floats c, floats d) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  float32x4_t ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b), cd = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
  vst1q_f32(out, vpaddq_f32(ab, cd));
#elif defined(__AVX2__)
  __m128 ab = _mm_hadd_ps(folded(a), folded(b)), cd = _mm_hadd_ps(folded(c), folded(d));
  _mm_storeu_ps(out, _mm_hadd_ps(ab, cd));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

INLINE float largest(floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float v[LANES], best;
  store(v, x);
  best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

INLINE floats choose(ints where, floats yes, floats no) {
  return (floats)(((ints)yes & where) | ((ints)no & ~where));
}

/* e^x to about one unit in the last place; 0 below -87, so e^-infinity is 0; NaN stays NaN */
INLINE floats exponential(floats x) {
  ints tiny = x < all(-87.0f), huge = x > all(88.0f);
  floats y = choose(tiny, all(-87.0f), choose(huge, all(88.0f), x));
  floats shifted = fused(y, all(1.44269504f), all(12582912.0f)); /* 1.5 x 2^23: the nearest integer, in the low bits */
  floats n = shifted - all(12582912.0f);
  floats r = fused(n, all(2.12194440e-4f), fused(n, all(-0.693359375f), y));
  floats p = all(1.9875691500e-4f);
  p = fused(p, r, all(1.3981999507e-3f));
  p = fused(p, r, all(8.3334519073e-3f));
  p = fused(p, r, all(4.1665795894e-2f));
  p = fused(p, r, all(1.6666665459e-1f));
  p = fused(p, r, all(5.0000001201e-1f));
  p = fused(p * r, r, r) + all(1.0f);
  floats power = (floats)(((ints)shifted + 127) << 23); /* what 2^23 adds above the low bits is shifted out */
  return choose(tiny, all(0), p * power);
}

INLINE float exponential_one(float x) {
  float v[LANES];
  store(v, exponential(all(x)));
  return v[0];
}

#if defined(__AVX512F__)
/* e^x for x up to 88 in ten instructions, where `exponential` takes twice as many: a power of two, and a polynomial for the
 * rest of the exponent. Off by 2e-7 of itself near 0, by 4e-7 at -20, by 1.3e-6 at -87 and 88; 0 below -87; NaN stays NaN. */
INLINE floats quick_exponential(floats x) {
  __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-87.0f), _CMP_NLT_UQ);
  floats n = (floats)_mm512_roundscale_ps((__m512)(x * all(1.44269504f)), 0);
  floats rest = fused(x, all(1.44269504f), -n);
  floats p = fused(all(1.3264724043e-3f), rest, all(9.6715128653e-3f));
  p = fused(p, rest, all(5.5507337537e-2f));
  p = fused(p, rest, all(2.4022242080e-1f));
  p = fused(p, rest, all(6.9314697759e-1f));
  p = fused(p, rest, all(1.0f));
  return (floats)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
}

/* No division, which would take as long as all the rest. Below -87 the exponential stands still, and then x. */
INLINE floats silu(floats x) {
  floats below = all(1) + quick_exponential((floats)_mm512_min_ps((__m512)all(87.0f), (__m512)-x));
  floats about = (floats)_mm512_rcp14_ps((__m512)below);
  return (floats)_mm512_max_ps((__m512)all(-100.0f), (__m512)x) * (about * fused(-below, about, all(2)));
}
#else
INLINE floats silu(floats x) { return x / (all(1) + exponential(-x)); }
#endif

static float load_any(const void *p, long i, int type) {
  if (type == FLOAT32) return ((const float *)p)[i];
  return type == BFLOAT16 ? load_one(at(p, i, BFLOAT16), BFLOAT16) : load_one(at(p, i, FLOAT16), FLOAT16);
}

INLINE void widen(const char *from, int type, long n, float *to) {
  long i = 0;
  for (; i + LINE <= n; i += LINE) {
    floats values[LINE / LANES];
    __builtin_prefetch(from + i * 2 + 512);
    load_line(values, from + i * 2, type);
    for (int v = 0; v < LINE / LANES; v++) store(to + i + v * LANES, values[v]);
  }
  for (; i < n; i++) to[i] = load_one(from + i * 2, type);
}

/* n values as float32: where they are, or copied */
static const float *widened(const void *from, int type, long n, float *to) {
  if (type == FLOAT32) return from;
  if (type == BFLOAT16) widen(from, BFLOAT16, n, to);
  if (type == FLOAT16) widen(from, FLOAT16, n, to);
  return to;
}

#include "arm.c"

/* ---------------------------------------------------------------- dot products
 *
 * A tile of rows of x times rows of w, both along memory: out[i, j] = x_i . w_j. Each of the sums runs over k in
 * LANES lanes from left to right, then the lanes are added, then what is left of k: the same for every tile size. */

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

/* the lanes of one sum, and what is left of k from `rest` on */
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

/* one function for every size, and a table of them */
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

/* any number of rows of x against `count` rows of w; meanwhile what lies at `soon` is fetched, if anything */
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

enum { WORTH_THREADS = 1 << 15 }; /* values: fewer are done before a second thread has woken */

static int team(int threads, long values) { return values > WORTH_THREADS ? threads : 1; }

/* Memory of the calling thread, which only grows: fresh memory would cost a page fault every 4 KiB. It is not given back when
 * the thread ends: an engine's threads live as long as it does. */
enum { ROOM_ROWS, ROOM_TILES, ROOM_PANELS, ROOMS };
static void *room_for(int use, size_t size) {
  static __thread struct {
    char *room;
    size_t size;
  } held[ROOMS];
  if (size > held[use].size) {
    free(held[use].room);
    held[use].size = (size + 0xffff) & ~(size_t)0xffff;
    held[use].room = aligned_alloc(64, held[use].size);
    if (!held[use].room) held[use].size = 0;
  }
  return held[use].room;
}

typedef int8_t small_ints __attribute__((vector_size(LANES)));
typedef small_ints loose_small_ints __attribute__((aligned(1), may_alias));

/* the nearest of 255 steps between -largest and largest, and their sum; returns the step: NaN where any value is */
static float to_bytes(int8_t *to, int32_t *total, const float *x, long n, long padded) {
  floats sizes = all(0), high = all(12582912.0f); /* 1.5 x 2^23: the nearest integer comes to stand in the low bits */
  ints broken = {0};
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    floats here = load(x + i), size = (floats)((ints)here & 0x7fffffff);
    sizes = choose(size > sizes, size, sizes);
    broken |= here != here;
  }
  float most = largest(sizes);
  for (; i < n; i++) most = fabsf(x[i]) > most || x[i] != x[i] ? fabsf(x[i]) : most;
  for (int lane = 0; lane < LANES; lane++) most = broken[lane] ? NAN : most;
  float inverse = most > 0 ? 127.0f / most : 0;
  for (i = 0; i + LANES <= n; i += LANES)
    *(loose_small_ints *)(to + i) = __builtin_convertvector((ints)(load(x + i) * all(inverse) + high), small_ints);
  for (; i < n; i++) to[i] = (int8_t)(int32_t)rintf(x[i] * inverse);
  memset(to + n, 0, padded - n);
  *total = 0;
  for (i = 0; i < n; i++) *total += to[i];
  return most / 127.0f;
}

INLINE void norm_row(float *out, const float *x, const void *weight, int type, long n, float eps) {
  floats squares = all(0);
  long i = 0;
  for (; i + LANES <= n; i += LANES) squares = fused(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < n; i++) total = fused_one(x[i], x[i], total);
  float scale = 1.0f / sqrtf(total / (float)n + eps);
  for (i = 0; i + LANES <= n; i += LANES)
    store(out + i, load(x + i) * all(scale) * load_as(at(weight, i, type), type));
  for (; i < n; i++) out[i] = x[i] * scale * load_one(at(weight, i, type), type);
}

static void norm(float *out, const float *x, const void *weight, int type, long n, float eps) {
  if (type == FLOAT32) norm_row(out, x, weight, FLOAT32, n, eps);
  if (type == BFLOAT16) norm_row(out, x, weight, BFLOAT16, n, eps);
  if (type == FLOAT16) norm_row(out, x, weight, FLOAT16, n, eps);
}

#include "pairs.c"
#include "tiles.c"

/* ---------------------------------------------------------------- linear layers
 *
 * Where there are products of bfloat16, see tiles.c and pairs.c; this is for all other types and machines.
 * Weights lie as torch has them, [outputs, inputs], and come from memory once. A task is some rows of them.
 * Up to DOT_ROWS rows of x: two long streams of weights, which is how memory gives most. More rows: weights in groups of
 * DOT_COLUMNS, which stay in the first cache while all rows of x pass by and the next group is fetched; 16-bit weights
 * are widened once per group. */

enum { LINE_BLOCK = 32 };

typedef struct {
  const float *x;
  const void *weight;
  const void *bias;      /* or none */
  const float *residual; /* or none; may be out */
  float *out;
  long rows, inputs, outputs;
  int type; /* of weight and bias */
} Linear;

static void put(const Linear *t, long row, long column, float value) {
  long place = row * t->outputs + column;
  if (t->bias) value += load_any(t->bias, column, t->type);
  if (t->residual) value += t->residual[place];
  t->out[place] = value;
}

/* the same for [rows, count] values; most layers have no bias, and then a row is done at once */
static void put_group(const Linear *t, long row, long rows, long column, int count, const float *values) {
  for (long i = 0; i < rows; i++, values += count) {
    long place = (row + i) * t->outputs + column;
    if (t->bias || count != DOT_COLUMNS)
      for (int n = 0; n < count; n++) put(t, row + i, column + n, values[n]);
    else if (t->residual)
      for (int n = 0; n < DOT_COLUMNS; n++) t->out[place + n] = values[n] + t->residual[place + n];
    else
      memcpy(t->out + place, values, sizeof(float) * DOT_COLUMNS);
  }
}

INLINE void two_streams(const Linear *t, int type, int rows, long first, long count) {
  long k = t->inputs, half = count / 2;
  for (long step = 0; step < count - half; step++) {
    long columns[2] = {first + half + step, first + step}; /* an odd count leaves one row over in the first stream */
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
        put(t, i, columns[n], dot_end(sums[i][n], t->x + i * k, w[n], type, at_k, k));
  }
}

/* one function for every type and number of rows */
typedef void Streams(const Linear *, long, long);
#define STREAMS(type, rows) \
  static void streams_##type##_##rows(const Linear *t, long first, long count) { two_streams(t, type, rows, first, count); }
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
    put_group(t, row, rows, j, group, found);
    j += group;
  }
}

/* 0: done. 1: no memory. */
API int shoal_linear(float *out, const float *x, const void *weight, int type, int laid, const void *bias,
                     const float *residual, long rows, long inputs, long outputs, int threads) {
  if (rows < 1) return 0;
#if HAS_TILES
  Tiled work = {.weight = weight, .row_bytes = inputs * 2, .x = x, .bias = bias, .bias_type = type,
                .residual = residual, .out = out, .rows = rows, .inputs = inputs, .outputs = outputs, .laid = laid};
  if (type == BFLOAT16) return tiled(&work, threads);
#elif HAS_PAIRS
  if (type == BFLOAT16) return paired(out, x, weight, bias, residual, rows, inputs, outputs, threads);
#endif
  (void)laid;
  Linear t = {x, weight, bias, residual, out, rows, inputs, outputs, type};
  int few = rows <= DOT_ROWS;
  long blocks = (rows + LINE_BLOCK - 1) / LINE_BLOCK;
  long width = outputs / (threads * (few ? 4 : 8)) / 12 * 12, most = few ? 384 : 96;
  width = width < 12 ? 12 : width > most ? most : width;
  long tasks = (outputs + width - 1) / width;
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
  {
    float *wide = few || type == FLOAT32 ? NULL : malloc(sizeof(float) * DOT_COLUMNS * inputs);
    failed = !few && type != FLOAT32 && !wide;
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < blocks * tasks; task++) {
      long row = task % blocks * LINE_BLOCK, first = task / blocks * width;
      long these = rows - row < LINE_BLOCK ? rows - row : LINE_BLOCK;
      long count = outputs - first < width ? outputs - first : width;
      if (few)
        streams[type][rows - 1](&t, first, count);
      else if (!failed)
        many_rows(&t, row, these, first, count, wide);
    }
    free(wide);
  }
  return failed;
}

API int shoal_has_tiles(void) { return HAS_TILES; }
/* Lay a matrix in tiles, where it is: from then on every call that takes it must be told. 0: done. 1: no memory. -1: this
 * library has no tiles. */
API int shoal_lay(void *weight, long rows, long row_bytes, int threads) {
#if HAS_TILES
  return lay_in_tiles(weight, rows, row_bytes, threads);
#else
  (void)weight, (void)rows, (void)row_bytes, (void)threads;
  return -1;
#endif
}
API int shoal_has_pairs(void) { return HAS_PAIRS; }
/* 0: all instructions of this library may be used. Else the error with which the system refused. */
API int shoal_permitted(void) { return tiles_permitted(); }
/* End the threads that wait for the calling thread's next work. 0: done. */
API int shoal_release_threads(void) {
#if defined(_OPENMP) && (_OPENMP >= 201811 || (defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10))
  return omp_pause_resource_all(omp_pause_hard);
#else
  return -1;
#endif
}

/* ---------------------------------------------------------------- linear layers with 8-bit weights
 *
 * Weights are 8-bit integers with one scale per output, laid out as those above; rows of x become 8-bit integers with one
 * scale per row before the products. Sums of integers are exact, so their order does not matter. `inputs` is a multiple
 * of INT8_PAD, filled up with zeros. */

enum { INT8_PAD = 64 };

/* x86 multiplies unsigned bytes by signed ones: weights are raised by INT8_RAISE, and so many times the sum of a row of x
 * is taken off in the end. */
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
      long place = (row + i) * t->outputs + column[j];
      int32_t count = sum_counts(sums[i][j]) - INT8_RAISE * t->x_sums[row + i];
      float value = (float)count * t->x_scales[row + i] * t->scales[column[j]];
      if (t->bias) value += load_any(t->bias, column[j], t->bias_type);
      if (t->residual) value += t->residual[place];
      t->out[place] = value;
    }
}

typedef void Dots8(const Linear8 *, const int8_t *const *, const int8_t *const *, long, const long *, const char *, int);
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
      (group > 1 ? wide_dots8 : one_dots8)[(unsigned)(these - 1) % DOT_ROWS](t, x, w, row + i, column, soon, group > 1 ? pace : 0);
      soon += pace * t->inputs;
    }
    j += group;
  }
}

/* 0: done. 1: no memory. `x` has `real` inputs. */
API int shoal_linear8(float *out, const float *x, const int8_t *weight, int laid, const float *scales, const void *bias,
                      int bias_type, const float *residual, long rows, long real, long inputs, long outputs,
                      int threads) {
  if (rows < 1) return 0;
#if HAS_TILES
  Tiled work = {.weight = (const char *)weight, .row_bytes = inputs, .x = x, .bias = bias, .bias_type = bias_type,
                .residual = residual, .out = out, .rows = rows, .inputs = real, .outputs = outputs, .laid = laid};
  return take_bytes(&work, scales) ? tiled(&work, threads) : 1;
#endif
  float *steps = room_for(ROOM_ROWS, rows * (inputs + sizeof(float) + sizeof(int32_t)));
  if (!steps) return 1;
  int32_t *totals = (int32_t *)(steps + rows);
  int8_t *small = (int8_t *)(totals + rows);
  (void)laid;
  Linear8 t = {small, weight, steps, scales, totals, bias, residual, out, rows, inputs, outputs, bias_type};
  int few = rows <= DOT_ROWS;
  long blocks = (rows + LINE_BLOCK - 1) / LINE_BLOCK;
  long width = outputs / (threads * (few ? 4 : 8)) / 12 * 12, most = few ? 768 : 192;
  width = width < 12 ? 12 : width > most ? most : width;
  long tasks = (outputs + width - 1) / width;
  if (few) /* sooner done than shared */
    for (long r = 0; r < rows; r++) steps[r] = to_bytes(small + r * inputs, totals + r, x + r * real, real, inputs);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (!few)
#pragma omp for schedule(static)
      for (long r = 0; r < rows; r++) steps[r] = to_bytes(small + r * inputs, totals + r, x + r * real, real, inputs);
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < blocks * tasks; task++) {
      long row = task % blocks * LINE_BLOCK, first = task / blocks * width;
      long these = rows - row < LINE_BLOCK ? rows - row : LINE_BLOCK;
      long count = outputs - first < width ? outputs - first : width;
      if (few)
        few_rows8(&t, first, count);
      else
        many_rows8(&t, row, these, first, count);
    }
  }
  return 0;
}

/* ---------------------------------------------------------------- attention
 *
 * The queries of a sequence times the query heads of a KV head are the rows of a block; keys and values are read in
 * place, through the block table, in tiles of TILE tokens counted from the sequence's beginning, with a running softmax.
 * Every PIECE tokens the softmax starts anew and its result is joined to what came before: so a long past can be shared
 * among threads, or not, with the same result to the last bit. */

enum { TILE = 64, PIECE = 512, MOST_ROWS = 32, MOST_DIM = 256, MANY_ROWS = HAS_TILES ? 4 * MOST_ROWS : MOST_ROWS };
/* at once: rows and keys of scores, vectors of sums, vectors of exponentials; AVX2 has half the registers */
#if defined(__AVX2__) && !defined(__AVX512F__)
enum { SOME_ROWS = 3, MOST_KEYS = 4 };
#else
enum { SOME_ROWS = 4, MOST_KEYS = 8 };
#endif
enum { MOST_VECTORS = MIX_VECTORS * 4, TOGETHER = 4 };

typedef struct {
  float *out;     /* [tokens, heads, dim] */
  const float *q; /* rows of q_stride floats */
  const void *keys, *values;
  const int64_t *tables, *starts, *contexts;
  long q_stride, table_width, sequences, heads, kv_heads, dim, block_size, window;
  float scale;
  int type; /* of keys and values */
} Attention;

/* a block of rows: `queries` queries from `first` on, times `count` query heads from `head` on; a single query may take those
 * of several KV heads */
typedef struct {
  long sequence, kv_head, kv_heads, head, count, first, queries, piece; /* piece: only this one; below 0: all */
  float *partial;                                                       /* where a piece goes */
} Block;

/* what rows have seen: the largest score, the sum of exponentials, values weighted by them */
typedef struct {
  float top[MANY_ROWS], mass[MANY_ROWS];
  float *mixed;
} Seen;

/* 2 LANES values of a type, as float32 */
INLINE void load_two(floats *out, const void *p, int type) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  if (type == BFLOAT16) {
    uint16x8_t x = vld1q_u16(p), zero = vdupq_n_u16(0);
    out[0] = (floats)vzip1q_u16(zero, x), out[1] = (floats)vzip2q_u16(zero, x);
    return;
  }
#endif
  out[0] = load_as(p, type), out[1] = load_as(at(p, LANES, type), type);
}

/* tokens of a tile, in keys or values: token t at places[t] from `start` on, in numbers of the type */
typedef struct {
  const void *start;
  const long *places;
} Tokens;

INLINE const void *token(Tokens from, long t, int type) { return at(from.start, from.places[t], type); }

/* memory that will be needed: so many bytes of each of some tokens, in the order in which they lie */
typedef struct {
  const char *start;
  const long *places; /* as those of Tokens */
  long token, last, byte, bytes, size;
} Ahead;

/* Ask for the next lines of it: blocks lie anywhere, so the CPU cannot guess what comes next. It can wait for only
 * so many lines at once (about 20 on a Neoverse-N1, reckoned from its speed), so they are asked for evenly while something is computed.
 * Tiles take so much of so many tokens at once that the first cache would not hold it. */
INLINE void fetch(Ahead *ahead, long lines) {
  for (; lines > 0 && ahead->token < ahead->last; lines--) {
    __builtin_prefetch(ahead->start + ahead->places[ahead->token] * ahead->size + ahead->byte, 0, HAS_TILES ? 2 : 3);
    ahead->byte += 64;
    if (ahead->byte >= ahead->bytes) ahead->byte = 0, ahead->token++;
  }
}

INLINE long lines_of(long values, int type) { return (values * (long)size_of(type) + 63) / 64; }

/* Scores of some rows of queries and `count` keys. Each sum runs over dim in LANES lanes from left to right, then the lanes
 * are added: the same for every number of rows and keys, and for keys widened before. */
INLINE void score(const float *q, Tokens keys, long t, int type, long dim, int rows, int count, float *scores) {
  floats sums[SOME_ROWS][MOST_KEYS];
  const void *lines[MOST_KEYS];
#pragma GCC unroll 8
  for (int j = 0; j < count; j++) {
    lines[j] = token(keys, t + j, type);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) sums[i][j] = all(0);
  }
  long k = 0;
  for (; k + 2 * LANES <= dim; k += 2 * LANES) {
    floats left[SOME_ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) load_two(left[i], q + i * dim + k, FLOAT32);
#pragma GCC unroll 8
    for (int j = 0; j < count; j++) {
      floats right[2];
      load_two(right, at(lines[j], k, type), type);
#pragma GCC unroll 2
      for (int n = 0; n < 2; n++)
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) sums[i][j] = fused(left[i][n], right[n], sums[i][j]);
    }
  }
  for (; k < dim; k += LANES)
#pragma GCC unroll 8
    for (int j = 0; j < count; j++)
#pragma GCC unroll 8
      for (int i = 0; i < rows; i++)
        sums[i][j] = fused(load(q + i * dim + k), load_as(at(lines[j], k, type), type), sums[i][j]);
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < count; j += 4)
      sum4(scores + i * TILE + t + j, sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
}

/* `count` tokens more for the sums of `mix` */
INLINE void mix_step(floats sums[][MOST_VECTORS], const float *shares, Tokens values, long t, int type, long place,
                     int rows, int vectors, int count) {
  floats share[SOME_ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < rows && count == 4 && LANES == 4; i++) share[i] = load(shares + i * TILE + t);
#pragma GCC unroll 4
  for (int n = 0; n < count; n++) {
    const void *line = at(token(values, t + n, type), place, type);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v += 2) {
      floats value[2];
      if (vectors > 1)
        load_two(value, at(line, v * LANES, type), type);
      else
        value[0] = load_as(line, type);
#pragma GCC unroll 8
      for (int i = 0; i < rows; i++) {
        floats one = count == 4 && LANES == 4 ? all(share[i][n]) : all(shares[i * TILE + t + n]);
        sums[i][v] = fused(value[0], one, sums[i][v]);
        if (vectors > 1) sums[i][v + 1] = fused(value[1], one, sums[i][v + 1]);
      }
    }
  }
}

/* some rows of sums of values times their shares, from `place` on; token by token, whatever the number of rows */
INLINE void mix(float *to, const float *shares, const float *rescale, Tokens values, Ahead *ahead, long first, long last,
                int type, long dim, long place, int rows, int vectors) {
  floats sums[SOME_ROWS][MOST_VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) sums[i][v] = load(to + i * dim + place + v * LANES) * all(rescale[i]);
  long t = first;
  for (; t + 4 <= last; t += 4) {
    fetch(ahead, lines_of(4 * vectors * LANES, type));
    mix_step(sums, shares, values, t, type, place, rows, vectors, 4);
  }
  for (; t < last; t++) mix_step(sums, shares, values, t, type, place, rows, vectors, 1);
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) store(to + i * dim + place + v * LANES, sums[i][v]);
}

/* One function for every type and number of rows. Scores: of several KV heads, each with so many rows; a key is read from
 * first rounded down to last rounded up. */
typedef void Score(const float *, Tokens, Ahead *, long, long, long, long, float *);
typedef void Mix(float *, const float *, const float *, Tokens, Ahead *, long, long, long);
#define ATTEND(type, rows)                                                                                          \
  static void score_##type##_##rows(const float *q, Tokens keys, Ahead *ahead, long first, long last, long dim,     \
                                    long heads, float *scores) {                                                    \
    enum { COUNT = rows > 2 ? 4 : MOST_KEYS };                                                                      \
    for (long t = first / COUNT * COUNT; t < last; t += COUNT)                                                      \
      for (long h = 0; h < heads; h++) {                                                                            \
        Tokens here = {at(keys.start, h * dim, type), keys.places};                                                 \
        fetch(ahead, lines_of(COUNT * dim, type));                                                                  \
        score(q + h * rows * dim, here, t, type, dim, rows, COUNT, scores + h * rows * TILE);                       \
      }                                                                                                             \
  }                                                                                                                 \
  static void mix_##type##_##rows(float *to, const float *shares, const float *rescale, Tokens values,              \
                                  Ahead *ahead, long first, long last, long dim) {                                  \
    enum { VECTORS = MIX_VECTORS * (4 / rows) };                                                                     \
    long place = 0;                                                                                                 \
    for (; place + VECTORS * LANES <= dim; place += VECTORS * LANES)                                                \
      mix(to, shares, rescale, values, ahead, first, last, type, dim, place, rows, VECTORS);                        \
    for (; place + 2 * LANES <= dim; place += 2 * LANES)                                                            \
      mix(to, shares, rescale, values, ahead, first, last, type, dim, place, rows, 2);                              \
    if (place < dim) mix(to, shares, rescale, values, ahead, first, last, type, dim, place, rows, 1);               \
  }
ATTEND(FLOAT32, 1) ATTEND(FLOAT32, 2) ATTEND(FLOAT32, 3)
ATTEND(BFLOAT16, 1) ATTEND(BFLOAT16, 2) ATTEND(BFLOAT16, 3)
ATTEND(FLOAT16, 1) ATTEND(FLOAT16, 2) ATTEND(FLOAT16, 3)
#if defined(__AVX2__) && !defined(__AVX512F__)
#define OF_TYPE(name, type) {name##_##type##_1, name##_##type##_2, name##_##type##_3}
#else
ATTEND(FLOAT32, 4) ATTEND(BFLOAT16, 4) ATTEND(FLOAT16, 4)
#define OF_TYPE(name, type) {name##_##type##_1, name##_##type##_2, name##_##type##_3, name##_##type##_4}
#endif
static Score *const scorers[][SOME_ROWS] = {OF_TYPE(score, FLOAT32), OF_TYPE(score, BFLOAT16), OF_TYPE(score, FLOAT16)};
static Mix *const mixers[][SOME_ROWS] = {OF_TYPE(mix, FLOAT32), OF_TYPE(mix, BFLOAT16), OF_TYPE(mix, FLOAT16)};

/* the larger of each; what is not a number is not looked at */
INLINE floats larger(floats x, floats best) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  return (floats)vmaxnmq_f32((float32x4_t)x, (float32x4_t)best);
#elif defined(__AVX512F__)
  return (floats)_mm512_max_ps((__m512)x, (__m512)best);
#else
  return choose(x > best, x, best);
#endif
}

/* As `exponential`, of TOGETHER vectors, none above 0; 0 below -87.7. Step by step for all of them, except with AVX-512: a CPU
 * does not look far enough ahead to find the steps of the next vector itself (some 36 cycles for a vector of 4 on a Neoverse-N1 one by one, by a sampled profile). */
INLINE void exponentials(floats *x) {
#if defined(__AVX512F__)
#pragma GCC unroll 4
  for (int n = 0; n < TOGETHER; n++) x[n] = quick_exponential(x[n]);
#else
  floats shifted[TOGETHER], p[TOGETHER];
#define EACH(step) _Pragma("GCC unroll 4") for (int n = 0; n < TOGETHER; n++) step
  EACH(x[n] = choose(x[n] < all(-88.1f), all(-88.1f), x[n]));
  EACH(shifted[n] = fused(x[n], all(1.44269504f), all(12582912.0f)));
  EACH(p[n] = shifted[n] - all(12582912.0f));
  EACH(x[n] = fused(p[n], all(-0.693359375f), x[n]));
  EACH(x[n] = fused(p[n], all(2.12194440e-4f), x[n]));
  EACH(p[n] = fused(all(1.9875691500e-4f), x[n], all(1.3981999507e-3f)));
  EACH(p[n] = fused(p[n], x[n], all(8.3334519073e-3f)));
  EACH(p[n] = fused(p[n], x[n], all(4.1665795894e-2f)));
  EACH(p[n] = fused(p[n], x[n], all(1.6666665459e-1f)));
  EACH(p[n] = fused(p[n], x[n], all(5.0000001201e-1f)));
  EACH(p[n] = p[n] * x[n]);
  EACH(p[n] = fused(p[n], x[n], x[n]) + all(1.0f));
  EACH(x[n] = p[n] * (floats)(((ints)shifted[n] + 127) << 23)); /* 2^-127 comes out as 0 */
#undef EACH
#endif
}

/* scores[first..last - 1] stay; the others before `end` become -infinity */
INLINE void keep(float *scores, long first, long last, long end) {
  if (first <= 0 && last >= end) return;
  if (end == 0) return; /* it sees nothing of the tile, and last lies before it */
#if defined(__AVX512F__)
  uint64_t kept = last < TILE ? ((uint64_t)1 << last) - 1 : ~(uint64_t)0;
  if (first > 0) kept &= first < TILE ? ~(uint64_t)0 << first : 0;
  for (long t = 0; t < end; t += LANES) /* whole vectors: to load what was stored in parts would be to wait for it */
    store(scores + t, (floats)_mm512_mask_mov_ps((__m512)all(-INFINITY), (__mmask16)(kept >> t), (__m512)load(scores + t)));
#else
  for (long t = 0; t < first && t < end; t++) scores[t] = -INFINITY;
  for (long t = last; t < end; t++) scores[t] = -INFINITY;
#endif
}

/* What a row may not see of a tile becomes -infinity; returns its largest score up to now. `width`: how much of the tile it
 * sees, in whole steps. */
static float mask(float *scores, long from, long position, long window, float top, long *width) {
  enum { STEP = TOGETHER * LANES };
  long last = position - from, first = window ? last - window + 1 : 0; /* it sees first..last of this tile */
  long end = last < 0 ? 0 : last + 1 > TILE ? TILE : (last + STEP) / STEP * STEP;
  keep(scores, first, last + 1, end);
  floats best[TOGETHER];
#pragma GCC unroll 4
  for (int n = 0; n < TOGETHER; n++) best[n] = all(top);
  for (long t = 0; t < end; t += STEP)
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; n++) best[n] = larger(load(scores + t + n * LANES), best[n]);
#pragma GCC unroll 4
  for (int n = 1; n < TOGETHER; n++) best[0] = larger(best[n], best[0]);
  *width = end;
  return largest(best[0]);
}

/* scores of one row become shares: what it may not see is 0; returns their sum */
static float share_out(float *scores, long width, float base) {
  floats total = all(0);
  for (long t = 0; t < width; t += TOGETHER * LANES) {
    floats x[TOGETHER];
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; n++) x[n] = load(scores + t + n * LANES) - all(base);
    exponentials(x);
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; n++) store(scores + t + n * LANES, x[n]), total += x[n];
  }
  for (long t = width; t < TILE; t += LANES) store(scores + t, all(0));
  return sum(total);
}

INLINE float base_of(float top) { return top == -INFINITY ? 0 : top; }

/* where tokens of a tile lie in keys and values, in numbers of the cache's type; counted on, for a division each would cost
 * more than the rest */
static void find_tokens(const Attention *a, const Block *b, long from, long first, long last, long *places) {
  const int64_t *table = a->tables + b->sequence * a->table_width + (from + first) / a->block_size;
  long offset = (from + first) % a->block_size, line = a->kv_heads * a->dim;
  for (long t = first; t < last; t++) {
    places[t] = (*table * a->block_size + offset) * line + b->kv_head * a->dim;
    if (++offset == a->block_size) offset = 0, table++;
  }
}

/* where the block's first query stands */
static long first_position(const Attention *a, const Block *b) {
  long queries = a->starts[b->sequence + 1] - a->starts[b->sequence];
  return a->contexts[b->sequence] - queries + b->first;
}

/* the oldest position that any of its queries sees */
static long oldest_of(const Attention *a, const Block *b) {
  long position = first_position(a, b);
  return a->window && position - a->window + 1 > 0 ? position - a->window + 1 : 0;
}

/* the softmax of all rows of a block, one step for all after the other: no row waits for its own largest score */
static void share_rows(const Attention *a, const Block *b, long rows, long from, float *scores, Seen *seen, float *rescale) {
  long position = first_position(a, b), widths[MOST_ROWS];
  float now[MOST_ROWS], *top = seen->top, *mass = seen->mass;
  for (long r = 0; r < rows; r++)
    now[r] = mask(scores + r * TILE, from, position + r / b->count, a->window, top[r], widths + r);
  for (long r = 0; r < rows; r++) rescale[r] = top[r] - base_of(now[r]);
  for (long r = 0; r < rows; r += LANES) store(rescale + r, exponential(load(rescale + r)));
  for (long r = 0; r < rows; r++) {
    float total = share_out(scores + r * TILE, widths[r], base_of(now[r]));
    mass[r] = fused_one(mass[r], rescale[r], total), top[r] = now[r];
  }
}

/* the tokens of a tile that a block sees: first..last, counted from `from` on */
typedef struct {
  long from, first, last, places[TILE];
} Tile;

/* the tile from `from` on, of a piece that ends at `end` */
static void find_tile(const Attention *a, const Block *b, long from, long end, Tile *tile) {
  long oldest = oldest_of(a, b), first = oldest > from ? oldest - from : 0, last = end - from < TILE ? end - from : TILE;
  tile->from = from, tile->first = first, tile->last = last;
  find_tokens(a, b, from, first, last, tile->places);
  /* keys are scored in groups: what a group lacks is the nearest token, and the score is dropped */
  for (long t = first / MOST_KEYS * MOST_KEYS; t < first; t++) tile->places[t] = tile->places[first];
  for (long t = last; t % MOST_KEYS; t++) tile->places[t] = tile->places[last - 1];
}

/* the first tile of a piece; returns where the piece ends */
static long first_tile(const Attention *a, const Block *b, long piece, Tile *tile) {
  long oldest = oldest_of(a, b), newest = first_position(a, b) + b->queries - 1;
  long begin = piece * PIECE, end = begin + PIECE < newest + 1 ? begin + PIECE : newest + 1;
  find_tile(a, b, oldest > begin ? oldest / TILE * TILE : begin, end, tile);
  return end;
}

/* the tile that comes after one of a piece that ends at `end`: returns whose it is, or none */
static const Block *next_tile(const Attention *a, const Block *b, const Tile *tile, long end, const Block *next,
                              Tile *found) {
  if (tile->from + TILE < end) {
    find_tile(a, b, tile->from + TILE, end, found);
    return b;
  }
  if (next) first_tile(a, next, next->piece < 0 ? oldest_of(a, next) / PIECE : next->piece, found);
  return next;
}

static Ahead ahead_of(const Attention *a, const Block *b, const void *cache, const Tile *tile) {
  long size = (long)size_of(a->type);
  return (Ahead){cache, tile->places, tile->first, tile->last, 0, b->kv_heads * a->dim * size, size};
}

/* room for the keys or values of a tile, one behind the other in float32 */
typedef struct {
  float values[TILE * MOST_DIM];
  long places[TILE];
} Copy;

/* Where many rows use a tile, narrow values are widened once; and float32 is copied where tokens lie so far apart that a cache
 * puts them all in the same places (measured at 4 KiB: a sixth of a prompt's time on a Neoverse-N1). */
static int is_copied(const Attention *a, long rows) {
  return rows > SOME_ROWS && (a->type != FLOAT32 || a->kv_heads * a->dim * 4 % 2048 == 0);
}

/* keys or values of a tile, from a KV head of the block on: in the cache, or copied */
static Tokens tokens_of(const Attention *a, const Tile *tile, const void *cache, long head, Copy *copy) {
  Tokens found = {at(cache, head * a->dim, a->type), tile->places};
  if (!copy) return found;
  for (long t = tile->first / MOST_KEYS * MOST_KEYS; t < tile->last || t % MOST_KEYS; t++) {
    float *to = copy->values + t * a->dim;
    const float *wide = widened(token(found, t, a->type), a->type, a->dim, to);
    if (wide != to) memcpy(to, wide, sizeof(float) * a->dim);
    copy->places[t] = t * a->dim;
  }
  return (Tokens){copy->values, copy->places};
}

/* `each`: rows of a KV head. Few of them: token by token through all KV heads, as they lie in memory. */
static void score_rows(const Attention *a, const Block *b, const Tile *tile, const float *q, long each, Copy *copy,
                       Ahead *ahead, float *scores) {
  long some = each > SOME_ROWS ? 1 : b->kv_heads;
  for (long h = 0; h < b->kv_heads; h += some) {
    Tokens keys = tokens_of(a, tile, a->keys, h, copy);
    for (long done = 0; done < each; done += SOME_ROWS) {
      long these = each - done < SOME_ROWS ? each - done : SOME_ROWS, r = h * each + done;
      scorers[copy ? FLOAT32 : a->type][these - 1](q + r * a->dim, keys, ahead, tile->first, tile->last, a->dim, some,
                                                   scores + r * TILE);
    }
  }
}

static void mix_rows(const Attention *a, const Block *b, const Tile *tile, float *mixed, long each, Copy *copy,
                     Ahead *ahead, const float *scores, const float *rescale) {
  for (long h = 0; h < b->kv_heads; h++) {
    Tokens values = tokens_of(a, tile, a->values, h, copy);
    for (long done = 0; done < each; done += SOME_ROWS) {
      long these = each - done < SOME_ROWS ? each - done : SOME_ROWS, r = h * each + done;
      mixers[copy ? FLOAT32 : a->type][these - 1](mixed + r * a->dim, scores + r * TILE, rescale + r, values, ahead,
                                                  tile->first, tile->last, a->dim);
    }
  }
}

/* next: the block that the thread will take after this one, or none */
static void attend_piece(const Attention *a, const Block *b, const float *q, long rows, long piece, const Block *next,
                         Seen *seen) {
  long each = rows / b->kv_heads;
  float scores[MOST_ROWS * TILE], rescale[MOST_ROWS] = {0};
  Copy room, *copy = is_copied(a, each) ? &room : NULL;
  Tile tiles[2];
  long end = first_tile(a, b, piece, tiles);
  for (int turn = 0, more = 1; more; turn = !turn) {
    const Tile *tile = tiles + turn;
    Tile *then = tiles + !turn;
    Ahead ahead = ahead_of(a, b, a->values, tile);
    score_rows(a, b, tile, q, each, copy, &ahead, scores);
    share_rows(a, b, rows, tile->from, scores, seen, rescale);
    more = tile->from + TILE < end;
    const Block *after = next_tile(a, b, tile, end, next, then);
    ahead.last = 0;
    if (after) ahead = ahead_of(a, after, a->keys, then);
    mix_rows(a, b, tile, seen->mixed, each, copy, &ahead, scores, rescale);
  }
}

#include "attention_tiles.c"

/* rows of queries as the kernels of a block want them */
typedef struct {
  float wide[MOST_ROWS * MOST_DIM];
  char turned[HAS_TILES ? MANY_ROWS * MOST_DIM * 2 : 1] __attribute__((aligned(64))); /* for tiles */
} Queries;

/* row r of a block */
INLINE void take_query(const Attention *a, const Block *b, long r, float *to) {
  long token = a->starts[b->sequence] + b->first + r / b->count;
  const float *from = a->q + token * a->q_stride + (b->head + r % b->count) * a->dim;
  for (long i = 0; i < a->dim; i += LANES) store(to + i, load(from + i) * all(a->scale));
}

static void take_queries(const Attention *a, const Block *b, long rows, Queries *q) {
#if HAS_TILES
  if (in_tiles(a) && rows > GROUP * b->kv_heads) {
    for (long first = 0; first < rows || first % PART; first += GROUP) { /* parts are filled up with zeros */
      for (long r = 0; r < GROUP; r++)
        if (first + r < rows)
          take_query(a, b, first + r, q->wide + r * a->dim);
        else
          memset(q->wide + r * a->dim, 0, sizeof(float) * a->dim);
      turn_queries(q->turned + first * a->dim * 2, q->wide, GROUP, a->dim, 1);
    }
    shape_attention(GROUP);
    return;
  }
#endif
  for (long r = 0; r < rows; r++) take_query(a, b, r, q->wide + r * a->dim);
#if HAS_TILES
  if (in_tiles(a)) turn_queries(q->turned, q->wide, rows, a->dim, b->kv_heads), shape_attention(rows / b->kv_heads);
#endif
}

static void see_piece(const Attention *a, const Block *b, const Queries *q, long rows, long piece, const Block *next,
                      Seen *seen) {
  for (long r = 0; r < rows; r++) seen->top[r] = -INFINITY, seen->mass[r] = 0;
#if HAS_TILES
  if (in_tiles(a) && rows > GROUP * b->kv_heads) {
    attend_many(a, b, q->turned, rows, piece, seen);
    return;
  }
#endif
  memset(seen->mixed, 0, sizeof(float) * rows * a->dim);
#if HAS_TILES
  if (in_tiles(a)) {
    attend_few(a, b, q->turned, rows, piece, next, seen);
    return;
  }
#endif
  attend_piece(a, b, q->wide, rows, piece, next, seen);
}

/* one row: what was seen before, and a later piece */
static void join(float *top, float *mass, float *mixed, float later_top, float later_mass, const float *later, long dim) {
  float best = later_top > *top ? later_top : *top, base = best == -INFINITY ? 0 : best;
  float before = exponential_one(*top - base), after = exponential_one(later_top - base);
  for (long i = 0; i < dim; i += LANES) store(mixed + i, fused(load(mixed + i), all(before), load(later + i) * all(after)));
  *mass = fused_one(*mass, before, later_mass * after);
  *top = best;
}

static void finish(const Attention *a, const Block *b, long rows, const float *mass, const float *mixed) {
  for (long r = 0; r < rows; r++) {
    long token = a->starts[b->sequence] + b->first + r / b->count;
    float *out = a->out + (token * a->heads + b->head + r % b->count) * a->dim;
    for (long i = 0; i < a->dim; i += LANES) store(out + i, load(mixed + r * a->dim + i) / all(mass[r]));
  }
}

static void attend(const Attention *a, const Block *b, const Block *next) {
  Queries q;
  float mixed[MANY_ROWS * MOST_DIM], later[MANY_ROWS * MOST_DIM];
  long rows = b->queries * b->count, dim = a->dim;
  take_queries(a, b, rows, &q);
  if (b->piece >= 0) {
    Seen seen = {.mixed = b->partial + 2 * rows};
    see_piece(a, b, &q, rows, b->piece, next, &seen);
    memcpy(b->partial, seen.top, sizeof(float) * rows);
    memcpy(b->partial + rows, seen.mass, sizeof(float) * rows);
    return;
  }
  Seen seen = {.mixed = mixed}, more = {.mixed = later};
  long first = oldest_of(a, b) / PIECE, last = (first_position(a, b) + b->queries - 1) / PIECE;
  see_piece(a, b, &q, rows, first, first < last ? NULL : next, &seen);
  for (long piece = first + 1; piece <= last; piece++) {
    see_piece(a, b, &q, rows, piece, piece < last ? NULL : next, &more);
    for (long r = 0; r < rows; r++)
      join(seen.top + r, seen.mass + r, mixed + r * dim, more.top[r], more.mass[r], later + r * dim, dim);
  }
  finish(a, b, rows, seen.mass, mixed);
}

/* after all pieces of a block: join them, in order; they stand one behind the other from the first one's `partial` on */
static void join_pieces(const Attention *a, const Block *b, long pieces) {
  long rows = b->queries * b->count, dim = a->dim, size = rows * (2 + dim);
  float *seen = b->partial;
  for (long n = 1; n < pieces; n++) {
    const float *next = b->partial + n * size;
    for (long r = 0; r < rows; r++) {
      long line = 2 * rows + r * dim;
      join(seen + r, seen + rows + r, seen + line, next[r], next[rows + r], next + line, dim);
    }
  }
  finish(a, b, rows, seen + rows, seen + 2 * rows);
}

/* How a pass is cut into blocks: the KV heads of a single query in one, and the most rows of a stretch. */
typedef struct {
  long heads, rows;
} Cut;

/* The blocks of a pass, those with most work first: stretches of queries, then single queries, their past cut in pieces where
 * it is long. Returns how many; with no `blocks` it only counts, and says how many floats partial results take. */
static long cut(const Attention *a, Cut how, Block *blocks, float *partial, long *floats_needed) {
  long group = a->heads / a->kv_heads, count = group < MOST_ROWS ? group : MOST_ROWS, found = 0, used = 0;
  for (int single = 0; single < 2; single++)
    for (long s = 0; s < a->sequences; s++) {
      long queries = a->starts[s + 1] - a->starts[s], step = how.rows / count, some = single ? how.heads : 1;
      if (queries < 1 || (queries == 1) != single) continue;
      for (long last = queries; last > 0; last -= step)
        for (long kv_head = 0; kv_head < a->kv_heads; kv_head += some)
          for (long head = 0; head < group; head += count) {
            Block b = {.sequence = s, .kv_head = kv_head, .head = kv_head * group + head, .piece = -1};
            b.kv_heads = a->kv_heads - kv_head < some ? a->kv_heads - kv_head : some;
            b.count = b.kv_heads * (group - head < count ? group - head : count);
            b.first = last > step ? last - step : 0, b.queries = last - b.first;
            long first = oldest_of(a, &b) / PIECE, pieces = first_position(a, &b) / PIECE - first + 1;
            if (!single || pieces == 1) {
              if (blocks) blocks[found] = b;
              found++;
              continue;
            }
            for (long n = 0; n < pieces; n++, found++, used += b.count * (2 + a->dim))
              if (blocks) b.piece = first + n, b.partial = partial + used, blocks[found] = b;
          }
    }
  *floats_needed = used;
  return found;
}

/* How many KV heads of a single query one block takes: a token's lie side by side in memory, but threads must have enough to
 * share. */
static long heads_together(const Attention *a, int threads) {
  long group = a->heads / a->kv_heads, most = MOST_ROWS / group, singles = 0;
#if HAS_TILES
  if (in_tiles(a) && group > GROUP) return 1;
#endif
  for (long s = 0; s < a->sequences; s++) singles += a->starts[s + 1] - a->starts[s] == 1 ? a->contexts[s] / PIECE + 1 : 0;
  if (most > a->kv_heads) most = a->kv_heads;
  while (most > 1 && singles * (a->kv_heads / most) < 4 * threads) most--;
  return most > 1 ? most : 1;
}

/* The rows of a stretch in one block: tiles are prepared once for all of them, but threads must have enough to share. */
static long rows_together(const Attention *a, int threads) {
#if HAS_TILES
  for (long rows = MANY_ROWS; in_tiles(a) && rows > MOST_ROWS; rows /= 2) {
    long blocks = 0;
    for (long s = 0; s < a->sequences; s++) {
      long queries = a->starts[s + 1] - a->starts[s];
      if (queries > 1) blocks += (queries * a->heads / a->kv_heads + rows - 1) / rows * a->kv_heads;
    }
    if (blocks >= 4 * threads) return rows;
  }
#endif
  (void)a, (void)threads;
  return MOST_ROWS;
}

/* 0: done. 1: no memory. */
API int shoal_attention(float *out, const float *q, long q_stride, const void *keys, const void *values, int type,
                        const int64_t *tables, long table_width, const int64_t *starts, const int64_t *contexts,
                        long sequences, long heads, long kv_heads, long dim, long block_size, float scale, long window,
                        int threads) {
  Attention a = {out,         q,         keys,  values,   tables, starts,     contexts, q_stride,
                 table_width, sequences, heads, kv_heads, dim,    block_size, window,   scale,  type};
  Cut how = {heads_together(&a, threads), rows_together(&a, threads)};
  long needed, count = cut(&a, how, NULL, NULL, &needed);
  Block *blocks = malloc(sizeof(Block) * (count + 1));
  float *partial = malloc(sizeof(float) * (needed + LANES));
  if (!blocks || !partial) {
    free(blocks), free(partial);
    return 1;
  }
  cut(&a, how, blocks, partial, &needed);
  long taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
  {
    long next;
#pragma omp atomic capture
    next = taken++;
    for (long n = next; n < count; n = next) { /* one ahead, so that its memory can be asked for in time */
#pragma omp atomic capture
      next = taken++;
      attend(&a, blocks + n, next < count ? blocks + next : NULL);
    }
#if HAS_TILES
    if (in_tiles(&a)) tiles_end();
#endif
    if (needed) {
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
      for (long n = 0; n < count; n++) {
        const Block *b = blocks + n;
        int starts_here = b->piece >= 0 && b->piece == oldest_of(&a, b) / PIECE;
        if (starts_here) join_pieces(&a, b, first_position(&a, b) / PIECE - b->piece + 1);
      }
    }
  }
  free(blocks), free(partial);
  return 0;
}

/* ---------------------------------------------------------------- row by row */

API void shoal_rms_norm(float *out, const float *x, const void *weight, int type, long rows, long n, float eps,
                        int threads) {
#pragma omp parallel for schedule(static) num_threads(team(threads, rows * n))
  for (long r = 0; r < rows; r++) norm(out + r * n, x + r * n, weight, type, n, eps);
}

API void shoal_silu_mul(float *out, const float *gate_up, long rows, long n, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(threads, rows * n))
  for (long r = 0; r < rows; r++) {
    const float *gate = gate_up + r * 2 * n, *up = gate + n;
    float *to = out + r * n;
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
      store(to + i, silu(load(gate + i)) * load(up + i));
    }
    for (; i < n; i++) to[i] = gate[i] / (1 + exponential_one(-gate[i])) * up[i];
  }
}

/* value i with value i + dim/2 */
INLINE void turn(float *x, const float *cos, const float *sin, long dim) {
  long half = dim / 2, i = 0;
  for (; i + LANES <= half; i += LANES) {
    floats left = load(x + i), right = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, left * c - right * s);
    store(x + half + i, right * c + left * s);
  }
  for (; i < half; i++) {
    float left = x[i], right = x[half + i];
    x[i] = left * cos[i] - right * sin[i], x[half + i] = right * cos[i] + left * sin[i];
  }
}

static void narrow_to(void *to, const float *from, long n, int type) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    floats x = load(from + i);
    if (type == FLOAT32) store((float *)to + i, x);
    if (type == BFLOAT16) store_as((void *)at(to, i, BFLOAT16), x, BFLOAT16);
    if (type == FLOAT16) store_as((void *)at(to, i, FLOAT16), x, FLOAT16);
  }
  for (; i < n; i++) store_one((void *)at(to, i, type), from[i], type);
}

/* Queries are turned in place; keys and values go into the cache. */
API void shoal_rotate_store(float *qkv, long tokens, long heads, long kv_heads, long dim, const void *q_norm,
                            const void *k_norm, int norm_type, float eps, const float *cos, const float *sin,
                            long turn_stride, void *keys, void *values, int type, const int64_t *slots, int threads) {
  long width = (heads + 2 * kv_heads) * dim, kv_size = kv_heads * dim;
#pragma omp parallel for schedule(static) num_threads(team(threads, tokens * width))
  for (long t = 0; t < tokens; t++) {
    float *row = qkv + t * width;
    for (long head = 0; head < heads + kv_heads; head++) {
      const void *weight = head < heads ? q_norm : k_norm;
      if (weight) norm(row + head * dim, row + head * dim, weight, norm_type, dim, eps);
      turn(row + head * dim, cos + t * turn_stride, sin + t * turn_stride, dim);
    }
    if (slots[t] < 0) continue;
    narrow_to((char *)keys + slots[t] * kv_size * (long)size_of(type), row + heads * dim, kv_size, type);
    narrow_to((char *)values + slots[t] * kv_size * (long)size_of(type), row + heads * dim + kv_size, kv_size, type);
  }
}

/* rows of a matrix, `laid` in tiles or as torch has it. 0: done. 1: no memory. */
API int shoal_embed(float *out, const void *weight, int type, int laid, const int64_t *ids, long tokens, long n,
                    int threads) {
  int failed = 0;
#pragma omp parallel num_threads(team(threads, tokens * n)) reduction(| : failed)
  {
    char *room = laid ? malloc(n * (long)size_of(type)) : NULL;
    failed = laid && !room;
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++) {
      const char *from = at(weight, ids[t] * n, type);
      if (failed) continue;
      if (laid) laid_row(room, weight, ids[t], n * (long)size_of(type)), from = room;
      for (long i = 0; i < n; i++) out[t * n + i] = load_one(at(from, i, type), type);
    }
    free(room);
  }
  return failed;
}

/* of bytes, with a scale for each row of weight */
API int shoal_embed8(float *out, const int8_t *weight, int laid, const float *scales, const int64_t *ids, long tokens,
                     long n, long padded, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(team(threads, tokens * n)) reduction(| : failed)
  {
    int8_t *room = laid ? malloc(padded) : NULL;
    failed = laid && !room;
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++) {
      const int8_t *from = weight + ids[t] * padded;
      if (failed) continue;
      if (laid) laid_row(room, (const char *)weight, ids[t], padded), from = room;
      for (long i = 0; i < n; i++) out[t * n + i] = (float)from[i] * scales[ids[t]];
    }
    free(room);
  }
  return failed;
}

/* ---------------------------------------------------------------- all layers of a pass in one call
 *
 * The functions above in the order of a decoder's layer. The caller's structures are described in native.py. */

enum { INT8 = 3 };

typedef struct {
  const void *weight, *bias;
  const float *scales;          /* of INT8 */
  long inputs, padded, outputs; /* padded: inputs of INT8, filled up */
  int type, bias_type, laid;    /* laid: in tiles */
} Matrix;

typedef struct {
  Matrix qkv, out, gate_up, down;
  const void *attention_norm, *mlp_norm, *q_norm, *k_norm; /* the last two: or none */
  void *keys, *values;
  long heads, kv_heads, dim, window;
  float eps, scale;
  int norm_type, cache_type;
} Layer;

typedef struct {
  float *residual, *normed, *qkv, *mixed, *gate_up, *inner; /* the first is changed, the others are room to work in */
  const float *cos, *sin;
  const int64_t *slots, *tables, *starts, *contexts;
  long tokens, turn_stride, table_width, sequences, block_size;
  int threads;
} Pass;

static int product(float *out, const float *x, const Matrix *m, const float *residual, const Pass *p) {
  if (m->type == INT8)
    return shoal_linear8(out, x, m->weight, m->laid, m->scales, m->bias, m->bias_type, residual, p->tokens, m->inputs, m->padded,
                         m->outputs, p->threads);
  return shoal_linear(out, x, m->weight, m->type, m->laid, m->bias, residual, p->tokens, m->inputs, m->outputs,
                      p->threads);
}

#if HAS_TILES
/* a product of a pass by weights in tiles */
static Tiled tiled_product(float *out, const float *x, const Matrix *m, const Pass *p) {
  Tiled work = {.weight = m->weight, .x = x, .bias = m->bias, .bias_type = m->bias_type, .out = out, .rows = p->tokens,
                .inputs = m->inputs, .outputs = m->outputs, .laid = 1};
  work.row_bytes = m->type == INT8 ? m->padded : m->inputs * 2;
  return work;
}

/* the same of a normed x, which is never in memory */
static Tiled normed_product(float *out, const Matrix *m, const void *norm, const Layer *l, const Pass *p) {
  Tiled work = tiled_product(out, p->residual, m, p);
  work.norm = norm, work.norm_type = l->norm_type, work.eps = l->eps;
  return work;
}

static int run_tiled(Tiled *work, const Matrix *m, const Pass *p) {
  if (m->type == INT8 && !take_bytes(work, m->scales)) return 1;
  return tiled(work, p->threads);
}
#endif

static int projected(const Layer *l, const Pass *p) {
#if HAS_TILES
  if (l->qkv.laid) {
    Tiled work = normed_product(p->qkv, &l->qkv, l->attention_norm, l, p);
    return run_tiled(&work, &l->qkv, p);
  }
#endif
  shoal_rms_norm(p->normed, p->residual, l->attention_norm, l->norm_type, p->tokens, l->qkv.inputs, l->eps, p->threads);
  return product(p->qkv, p->normed, &l->qkv, NULL, p);
}

/* silu of gate_up's first half times its second, then down */
static int gated(const Layer *l, const Pass *p) {
#if HAS_TILES
  if (l->gate_up.laid && l->gate_up.outputs % (2 * TILE_ROWS) == 0) { /* the two halves are never in memory */
    int narrow = l->down.laid && l->down.type == BFLOAT16 && l->gate_up.type == BFLOAT16;
    Tiled up = normed_product(p->inner, &l->gate_up, l->mlp_norm, l, p);
    Tiled down = tiled_product(p->residual, p->inner, &l->down, p);
    up.gated = 1, down.residual = p->residual;
    if (narrow) up.made = down.ready = (char *)p->inner, down.is_ready = 1; /* rows filled up to 16 and halved: they fit */
    int failed = run_tiled(&up, &l->gate_up, p);
    if (!narrow) return failed | product(p->residual, p->inner, &l->down, p->residual, p);
    return failed | run_tiled(&down, &l->down, p);
  }
#endif
  shoal_rms_norm(p->normed, p->residual, l->mlp_norm, l->norm_type, p->tokens, l->gate_up.inputs, l->eps, p->threads);
  int failed = product(p->gate_up, p->normed, &l->gate_up, NULL, p);
  shoal_silu_mul(p->inner, p->gate_up, p->tokens, l->down.inputs, p->threads);
  return failed | product(p->residual, p->inner, &l->down, p->residual, p);
}

static int layer(const Layer *l, const Pass *p) {
  long q_stride = (l->heads + 2 * l->kv_heads) * l->dim;
  int failed = projected(l, p);
  shoal_rotate_store(p->qkv, p->tokens, l->heads, l->kv_heads, l->dim, l->q_norm, l->k_norm, l->norm_type, l->eps,
                     p->cos, p->sin, p->turn_stride, l->keys, l->values, l->cache_type, p->slots, p->threads);
  failed |= shoal_attention(p->mixed, p->qkv, q_stride, l->keys, l->values, l->cache_type, p->tables, p->table_width,
                            p->starts, p->contexts, p->sequences, l->heads, l->kv_heads, l->dim, p->block_size,
                            l->scale, l->window, p->threads);
  failed |= product(p->residual, p->mixed, &l->out, p->residual, p);
  return failed | gated(l, p);
}

/* 0: done. 1: no memory. */
API int shoal_layers(const Layer *layers, long count, const Pass *p) {
  for (long n = 0; n < count; n++)
    if (layer(layers + n, p)) return 1;
  return 0;
}

API int shoal_lanes(void) { return LANES; }
API int shoal_has_float16(void) { return HAS_FLOAT16; }

/* ---------------------------------------------------------------- choosing tokens
 *
 * For every line of scores: bias, penalties, forbidden ends and a grammar's mask; the likeliest token, or a draw after
 * temperature, top_k, top_p and min_p. The meaning is that of runner/sampler.py, the noise that of kernels/noise.py.
 *
 * A token is drawn as the largest of score + noise, so most tokens need no noise: those whose score is so far below the
 * largest sum found so far that no noise brings them there. The noise itself is worked out for the few that are left, with
 * logarithms in double precision rounded to float32 where torch rounds: the same on every machine, and within a unit in
 * the last place of what a float32 logarithm gives elsewhere. Nothing is sorted: a filter is a least score, found by
 * counting what lies above it in ever finer buckets. */

typedef struct {
  /* of every row of the sampler's tables */
  const float *temperature, *top_p, *min_p;
  const int64_t *top_k, *seed, *sample, *first_free_end;
  const int64_t *bias_first, *bias_count, *ends_first, *ends_count; /* stretches of the lists below */
  const int64_t *line;                                              /* of what was seen and said, or -1 */
  const float *repetition, *frequency, *presence;
  /* of all rows together */
  const int64_t *bias_ids, *ends_ids;
  const float *bias_amounts;
  /* [lines, vocabulary] */
  uint8_t *seen; /* in the prompt or the output */
  float *said;   /* how often in the output */
} Sampling;

typedef struct {
  const Sampling *state;
  const float *scores;
  const int64_t *rows, *positions; /* of each line of scores */
  const int64_t *mask_of;          /* of each line: which of the masks, or -1; none: no line has one */
  const uint32_t *masks;           /* a bit for each token that is allowed */
  int64_t *tokens;
  float *best;
  long n;
} Choice;

enum { BUCKETS = 2048, STRETCH = 64 };
typedef uint32_t loose_word __attribute__((may_alias));
static const float MOST_NOISE = 16.64f; /* no token gets more: -log(-log(1 - 2^-24)) is 16.6355 */

INLINE int any(ints where) {
  uint64_t parts[LANES / 2], found = 0;
  memcpy(parts, &where, sizeof parts);
  for (int i = 0; i < LANES / 2; i++) found |= parts[i];
  return found != 0;
}

/* a + b x c, rounded twice, as torch does */
INLINE float add_rounded(float a, float b, float c) {
  float product = b * c;
  __asm__("" : "+m"(product)); /* else the compiler makes one operation of it, which rounds once */
  return a + product;
}

static uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

static uint64_t draw_key(int64_t seed, int64_t sample, int64_t position) {
  const uint64_t golden = 0x9E3779B97F4A7C15u;
  uint64_t key = mix64((uint64_t)seed + golden) ^ (uint64_t)sample;
  key = mix64(key + golden) ^ (uint64_t)position;
  return mix64(key + golden);
}

INLINE words scramble(words x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

/* 23 random bits for each of LANES ids */
INLINE words random_bits(words ids, uint64_t key) {
  words mixed = scramble(ids * 0x9E3779B1u + (uint32_t)key);
  return scramble(mixed ^ (uint32_t)(key >> 32)) >> 9;
}

static float noise_of(uint32_t bits) {
  float uniform = ((float)bits + 0.5f) * 0x1p-23f;
  float inner = (float)-log((double)uniform);
  return (float)-log((double)inner);
}

/* No noise of these bits is larger, and none smaller by more than 0.07 where it matters: -log(u) is at least 1 - u, and
 * the bits of a float, read as a number, are a lower bound of its logarithm. */
INLINE floats noise_bound(words bits) {
  floats rest = all(8388607.5f) - __builtin_convertvector((ints)bits, floats); /* (1 - u) x 2^23 */
  return all(150.0f * 0.69314718f + 1e-3f) - __builtin_convertvector((ints)rest, floats) * all(0.69314718f * 0x1p-23f);
}

/* the largest of the scores, or NaN where one of them is none */
static float largest_of(const float *x, long n) {
  floats most[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
  ints broken = {0};
  long i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      floats here = load(x + i + j * LANES);
      most[j] = choose(here > most[j], here, most[j]);
      broken |= here != here;
    }
  for (int j = 1; j < 4; j++) most[0] = choose(most[j] > most[0], most[j], most[0]);
  float top = largest(most[0]);
  int bad = any(broken);
  for (; i < n; i++) {
    top = x[i] > top ? x[i] : top;
    bad |= x[i] != x[i];
  }
  return bad ? NAN : top;
}

/* where the value stands first; the last place if nowhere */
static long place_of(float value, const float *x, long n) {
  long i = 0;
  for (; i + STRETCH <= n; i += STRETCH) {
    ints found = {0};
#pragma GCC unroll 16
    for (int j = 0; j < STRETCH; j += LANES) found |= load(x + i + j) == all(value);
    if (any(found)) break;
  }
  while (i < n - 1 && x[i] != value) i++;
  return i;
}

/* The first largest of each row, and its place; a row that holds a NaN has the best NaN. */
API void shoal_argmax(int64_t *index, float *best, const float *scores, long rows, long n, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(threads, rows * n))
  for (long r = 0; r < rows; r++) {
    best[r] = largest_of(scores + r * n, n);
    index[r] = place_of(best[r], scores + r * n, n);
  }
}

typedef struct {
  float top, temperature; /* the best score; both as they are for scaled(), */
  float rate;             /* … and about 1 / temperature, where it need not be exact */
  float least;            /* the least scaled score that stays */
  uint64_t key;
  float sum; /* score and noise of the token chosen so far */
  long token;
} Draw;

INLINE float scaled(const Draw *d, float x) { return (x - d->top) / d->temperature; }

/* Scores so far below the best have scaled scores below `least`, whatever is rounded; it lets in a few more. A division
 * takes as long as ten other steps, so only those let in are scaled. */
INLINE float gate(const Draw *d, float least) { return d->temperature * (least - 1e-5f * fabsf(least) - 1e-5f); }

/* ids of the next LANES tokens */
INLINE words ids_from(long first) {
  words ids;
  for (int i = 0; i < LANES; i++) ids[i] = (uint32_t)first + i;
  return ids;
}

INLINE void try_one(Draw *d, const float *x, long id, uint32_t bits) {
  float value = scaled(d, x[id]);
  if (!(value >= d->least)) return;
  float sum = value + noise_of(bits);
  if (sum > d->sum || (sum == d->sum && id < d->token)) d->sum = sum, d->token = id;
}

INLINE float hope(const Draw *d) {
  float lowest = d->sum - MOST_NOISE;
  return gate(d, lowest > d->least ? lowest : d->least);
}

static void draw_one(Draw *d, const float *x, long n, long likeliest) {
  const words lanes = ids_from(0);
  d->sum = -INFINITY, d->token = likeliest;
  try_one(d, x, likeliest, random_bits(ids_from(likeliest), d->key)[0]);
  float enough = hope(d);
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    floats above = load(x + i) - all(d->top);
    if (!any(above >= all(enough))) continue;
    words bits = random_bits(lanes + (uint32_t)i, d->key);
    ints chance = above * all(d->rate) + noise_bound(bits) >= all(d->sum);
    if (!any(chance)) continue;
    for (int lane = 0; lane < LANES; lane++)
      if (chance[lane]) try_one(d, x, i + lane, bits[lane]);
    enough = hope(d);
  }
  for (; i < n; i++)
    if (x[i] - d->top >= enough) try_one(d, x, i, random_bits(ids_from(i), d->key)[0]);
}

/* The smallest of the values with less than `limit` strictly above it, counted by weights (none: each counts one). The
 * values are not above 0; both lists are lost. Bucket by bucket of the values' upper bits, then of the next, then of the
 * last: without their sign the bits of a larger value are the smaller number. */
static float smallest_within(float *values, float *weights, long count, double limit, double *buckets) {
  static const struct {
    int shift, last;
  } levels[] = {{20, BUCKETS - 1}, {10, 1023}, {0, 1023}};
  double above = 0;
  uint32_t key = 0;
  for (int level = 0; level < 3; level++) {
    int shift = levels[level].shift, last = levels[level].last, chosen = last;
    loose_word *bits = (loose_word *)values;
    memset(buckets, 0, sizeof(double) * (last + 1));
    if (weights)
      for (long i = 0; i < count; i++) buckets[bits[i] >> shift & last] += weights[i];
    else
      for (long i = 0; i < count; i++) buckets[bits[i] >> shift & last] += 1;
    double total = above;
    for (int bucket = 0; bucket <= last && total < limit; bucket++) {
      if (!(buckets[bucket] > 0)) continue;
      chosen = bucket, above = total;
      total += buckets[bucket];
    }
    key |= (uint32_t)chosen << shift;
    long kept = 0;
    for (long i = 0; i < count; i++) { /* no branch: it would be wrong half of the time */
      long here = (int)(bits[i] >> shift & last) == chosen;
      bits[kept] = bits[i];
      if (weights) weights[kept] = weights[i];
      kept += here;
    }
    count = kept;
  }
  float found;
  memcpy(&found, &key, 4);
  return -found;
}

/* the scaled scores that are at least `cut`, in order, as they are without their sign; forbidden ones never are */
static long those_from(float *to, const Draw *d, const float *x, long n, float cut) {
  cut = cut > -3e38f ? cut : -3e38f;
  float enough = gate(d, cut);
  long count = 0, i = 0;
  for (; i + LANES <= n; i += LANES) {
    if (!any(load(x + i) - all(d->top) >= all(enough))) continue;
    float here[LANES];
    store(here, (load(x + i) - all(d->top)) / all(d->temperature));
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++) {
      to[count] = -here[lane];
      count += here[lane] >= cut;
    }
  }
  for (; i < n; i++) {
    to[count] = -scaled(d, x[i]);
    count += -to[count] >= cut;
  }
  return count;
}

/* powers of e of the values' negatives, and their sum */
static double weigh(float *to, const float *values, long n) {
  double total = 0;
  for (long i = 0; i < n; i += LANES) { /* past the end there is room */
    floats weights = exponential(-load(values + i));
    store(to + i, weights);
    for (int lane = 0; lane < LANES && i + lane < n; lane++) total += weights[lane];
  }
  return total;
}

/* the sum of the powers of e of all scaled scores */
static double mass_of(const Draw *d, const float *x, long n) {
  double total = 0;
  long i = 0;
  for (; i + STRETCH <= n; i += STRETCH) {
    floats part = all(0);
#pragma GCC unroll 16
    for (int j = 0; j < STRETCH; j += LANES) part += exponential((load(x + i + j) - all(d->top)) * all(d->rate));
    total += sum(part);
  }
  for (; i < n; i++) total += exponential_one((x[i] - d->top) * d->rate);
  return total;
}

/* A score that at least k tokens reach, and not many more: there are k stretches of the vocabulary whose largest score is
 * at least the k-th largest of these. Room: a float for each stretch. */
static float reached_by(long k, const Draw *d, const float *x, long n, float *room, double *buckets) {
  long count = n / STRETCH;
  if (k > count) return -INFINITY;
  for (long stretch = 0; stretch < count; stretch++) {
    floats most = load(x + stretch * STRETCH);
#pragma GCC unroll 16
    for (int j = LANES; j < STRETCH; j += LANES) {
      floats here = load(x + stretch * STRETCH + j);
      most = choose(here > most, here, most);
    }
    room[stretch] = -scaled(d, largest(most));
  }
  return smallest_within(room, NULL, count, (double)k, buckets);
}

/* The least scaled score that top_k and top_p leave. Room: twice the vocabulary and two vectors, and the buckets. */
static float ranked(const Draw *d, const float *x, long n, long k, float p, float *room, double *buckets) {
  p = p > FLT_MIN ? p : FLT_MIN; /* a share too small for a float is still above 0: the likeliest stays */
  float *values = room, *weights = room + n + LANES, least = -INFINITY;
  double mass;
  long count;
  if (k > 0 && k < n) {
    count = those_from(values, d, x, n, reached_by(k, d, x, n, weights, buckets));
    least = smallest_within(values, NULL, count, (double)k, buckets);
    if (p >= 1) return least;
    count = those_from(values, d, x, n, least);
    mass = weigh(weights, values, count);
  } else {
    if (p >= 1) return least;
    mass = mass_of(d, x, n);
    /* n tokens of this likelihood hold less than top_p leaves out: so it is below what stays */
    count = those_from(values, d, x, n, (float)log((1 - (double)p) * mass / (double)n) - 1e-3f);
    weigh(weights, values, count);
  }
  float within = smallest_within(values, weights, count, (double)p * mass, buckets);
  return within > least ? within : least;
}

static void punish(const Sampling *s, long row, float *x, long n) {
  const uint8_t *seen = s->seen + s->line[row] * n;
  const float *said = s->said + s->line[row] * n;
  float repetition = s->repetition[row], frequency = s->frequency[row], presence = s->presence[row];
  for (long first = 0; first < n; first += 8) {
    long end = first + 8 < n ? first + 8 : n;
    uint64_t several = 0;
    memcpy(&several, seen + first, end - first);
    if (!several) continue;
    for (long i = first; i < end; i++) {
      if (!seen[i]) continue;
      float value = x[i] > 0 ? x[i] / repetition : x[i] * repetition;
      value = add_rounded(value, -frequency, said[i]);
      x[i] = value - (said[i] > 0 ? presence : 0);
    }
  }
}

static void allow_only(const uint32_t *mask, float *x, long n) {
  for (long first = 0; first < n; first += 32) {
    uint32_t allowed = mask[first / 32];
    if (allowed == 0xffffffffu) continue;
    long end = first + 32 < n ? first + 32 : n;
    for (long i = first; i < end; i++)
      if (!(allowed >> (i - first) & 1)) x[i] = -INFINITY;
  }
}

/* the line's scores with everything that changes them: in `room`, or where they are if nothing does */
static const float *changed(const Choice *c, long line, float *room) {
  const Sampling *s = c->state;
  const float *x = c->scores + line * c->n;
  long row = c->rows[line], mask = c->mask_of ? c->mask_of[line] : -1;
  long ends = mask < 0 && c->positions[line] < s->first_free_end[row] ? s->ends_count[row] : 0;
  if (!s->bias_count[row] && s->line[row] < 0 && !ends && mask < 0) return x;
  memcpy(room, x, sizeof(float) * c->n);
  if (s->line[row] >= 0) punish(s, row, room, c->n);
  for (long i = s->bias_first[row]; i < s->bias_first[row] + s->bias_count[row]; i++)
    room[s->bias_ids[i]] += s->bias_amounts[i];
  for (long i = s->ends_first[row]; i < s->ends_first[row] + ends; i++) room[s->ends_ids[i]] = -INFINITY;
  if (mask >= 0) allow_only(c->masks + mask * ((c->n + 31) / 32), room, c->n);
  return room;
}

static void choose_one(const Choice *c, long line, float *room) {
  const Sampling *s = c->state;
  long row = c->rows[line], n = c->n;
  double *buckets = (double *)room;
  room += 2 * BUCKETS;
  const float *x = changed(c, line, room);
  room += n;
  float best = largest_of(x, n);
  long token = isfinite(best) ? place_of(best, x, n) : 0;
  if (s->temperature[row] > 0 && isfinite(best)) {
    float least = s->min_p[row] > 0 ? (float)log((double)s->min_p[row]) : -INFINITY;
    Draw d = {.top = best, .temperature = s->temperature[row], .least = least};
    d.rate = 1 / (d.temperature > 1e-30f ? d.temperature : 1e-30f); /* below, all but the best are infinitely far away */
    d.key = draw_key(s->seed[row], s->sample[row], c->positions[line]);
    long k = s->top_k[row];
    if (k > 0 || s->top_p[row] < 1) {
      float within = ranked(&d, x, n, k, s->top_p[row], room, buckets);
      d.least = within > least ? within : least;
    }
    draw_one(&d, x, n, token);
    token = d.token;
  }
  c->tokens[line] = token, c->best[line] = best;
  if (s->line[row] >= 0) {
    s->seen[s->line[row] * n + token] = 1;
    s->said[s->line[row] * n + token] += 1;
  }
}

/* floats that every thread needs to work in */
API long shoal_draw_room(long n) { return 2 * BUCKETS + (3 * n + 3 * LINE - 1) / LINE * LINE; }

API void shoal_draw(const Choice *c, long lines, float *room, int threads) {
  long size = shoal_draw_room(c->n);
  int several = lines < threads ? (int)lines : threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team(several, lines * c->n))
  for (long line = 0; line < lines; line++) {
    int thread = 0;
#ifdef _OPENMP
    thread = omp_get_thread_num();
#endif
    choose_one(c, line, room + thread * size);
  }
}
