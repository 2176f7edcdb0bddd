/* The compiler's vector types, loads and stores for every number type, exponentials, transposes. Part of native.c. */

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
/* the same without alignment */
typedef floats loose_floats __attribute__((aligned(4), may_alias));
typedef halves loose_halves __attribute__((aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define API __attribute__((visibility("default")))

/* the last three: only weights, with scales per output, or per block of inputs (4 and 8 bits) */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, BLOCKS4 = 4, BLOCKS8 = 5 };
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

/* a b + c, rounded once on every CPU that has the instruction. Written out because the compiler may not fuse by itself
 * (-ffp-contract=off): it would fuse differently for different tile sizes. */
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
#if HAS_FLOAT16 && defined(__AVX512F__) /* gcc would convert one number at a time, and take seconds to compile it */
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
  if (type == BFLOAT16) { /* two instructions for eight values instead of six */
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

/* rounds to nearest, ties to even; NaN stays NaN */
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
/* adds the upper half to the lower one until four lanes are left */
INLINE __m128 folded(floats x) {
#if defined(__AVX512F__)
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
  __m256 half = (__m256)x;
#endif
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#endif

/* all lanes, added in one fixed order: upper half to lower half, then neighbours */
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
  floats shifted = fused(y, all(1.44269504f), all(12582912.0f)); /* 1.5 x 2^23: the nearest integer in the low bits */
  floats n = shifted - all(12582912.0f);
  floats r = fused(n, all(2.12194440e-4f), fused(n, all(-0.693359375f), y));
  floats p = all(1.9875691500e-4f);
  p = fused(p, r, all(1.3981999507e-3f));
  p = fused(p, r, all(8.3334519073e-3f));
  p = fused(p, r, all(4.1665795894e-2f));
  p = fused(p, r, all(1.6666665459e-1f));
  p = fused(p, r, all(5.0000001201e-1f));
  p = fused(p * r, r, r) + all(1.0f);
  floats power = (floats)(((ints)shifted + 127) << 23); /* the bits that 2^23 sets are shifted out */
  return choose(tiny, all(0), p * power);
}

INLINE float exponential_one(float x) {
  float v[LANES];
  store(v, exponential(all(x)));
  return v[0];
}

#if defined(__AVX512F__)
/* e^x for x up to 88 in ten instructions, half as many as `exponential`: a power of two times a polynomial of the
 * remaining exponent. Relative error 2e-7 near 0, 4e-7 at -20, 1.3e-6 at -87 and 88; 0 below -87; NaN stays NaN. */
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

/* Without a division, which would cost as much as everything else. The exponential is clamped at 87, x at -100. */
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

/* n values as float32: `from` itself, or a copy in `to` */
static const float *widened(const void *from, int type, long n, float *to) {
  if (type == FLOAT32) return from;
  if (type == BFLOAT16) widen(from, BFLOAT16, n, to);
  if (type == FLOAT16) widen(from, FLOAT16, n, to);
  return to;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/* transposes 8 rows of 8 words; strides as below */
INLINE void transpose8_to(uint32_t *to, long to_stride, const char *from, long stride) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps((const float *)(from + i * stride));
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2)
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  /* a[4 q + j] becomes column j, and j + 4 in its upper half, of rows 4 q to 4 q + 3 */
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44), a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44), a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    _mm256_storeu_ps((float *)(to + j * to_stride), _mm256_permute2f128_ps(a[j], a[4 + j], 0x20));
    _mm256_storeu_ps((float *)(to + (4 + j) * to_stride), _mm256_permute2f128_ps(a[j], a[4 + j], 0x31));
  }
}
#endif

/* transposes 16 rows of 16 words that are `stride` bytes apart; to_stride: in words */
static void transpose16_to(uint32_t *to, long to_stride, const char *from, long stride) {
#if defined(__AVX512F__)
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * stride);
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
    _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(odd, high_odd, 0x88));
    _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(low, high, 0xdd));
    _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(odd, high_odd, 0xdd));
  }
#elif defined(__AVX2__)
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 16; j += 8) transpose8_to(to + j * to_stride + i, to_stride, from + i * stride + j * 4, stride);
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) memcpy(to + j * to_stride + i, from + i * stride + j * 4, 4);
#endif
}
