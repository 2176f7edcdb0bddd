/* A row of float32 values rounded to 8-bit integers; the norm of a row. Part of native.c. */

typedef int8_t small_ints __attribute__((vector_size(LANES)));
typedef small_ints loose_small_ints __attribute__((aligned(1), may_alias));

INLINE void store_small(int8_t *to, ints x) {
#if defined(__AVX512F__) /* gcc would take four instructions */
  _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
  *(loose_small_ints *)to = __builtin_convertvector(x, small_ints);
#endif
}

/* Rounds to the nearest of 255 steps between -largest and largest; total: their sum. Returns the step; NaN if any value
 * is. */
static float quantize_row(int8_t *to, int32_t *total, const float *x, long n, long padded) {
  floats sizes = all(0), high = all(12582912.0f); /* 1.5 x 2^23 puts the nearest integer in the low bits */
  ints broken = {0}, counts = {0};
  int32_t sum_of_all = 0;
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
  for (i = 0; i + LANES <= n; i += LANES) {
    ints rounded = (ints)(load(x + i) * all(inverse) + high) - (ints)high;
    counts += rounded;
    store_small(to + i, rounded);
  }
  for (int lane = 0; lane < LANES; lane++) sum_of_all += counts[lane];
  for (; i < n; i++) to[i] = (int8_t)(int32_t)rintf(x[i] * inverse), sum_of_all += to[i];
  memset(to + n, 0, padded - n);
  *total = sum_of_all;
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
