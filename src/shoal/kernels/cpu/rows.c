/* Operations on single rows: norms, SwiGLU, rotary embedding with KV writes, embedding lookup. Part of native.c. */

API void shoal_rms_norm(float *out, const float *x, const void *weight, int type, long rows, long n, float eps,
                        int threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, rows * n))
  for (long r = 0; r < rows; r++) norm(out + r * n, x + r * n, weight, type, n, eps);
}

API void shoal_silu_mul(float *out, const float *gate_up, long rows, long n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, rows * n))
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

/* rotary embedding: value i with value i + dim/2 */
INLINE void rotate(float *x, const float *cos, const float *sin, long dim) {
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

/* Queries are rotated in place; keys and values are written into the KV cache. */
API void shoal_rotate_store(float *qkv, long tokens, long heads, long kv_heads, long dim, const void *q_norm,
                            const void *k_norm, int norm_type, float eps, const float *cos, const float *sin,
                            long rope_stride, void *keys, void *values, int type, const int64_t *slots, int threads) {
  long width = (heads + 2 * kv_heads) * dim, kv_size = kv_heads * dim;
#pragma omp parallel for schedule(static) num_threads(threads_for(threads, tokens * width))
  for (long t = 0; t < tokens; t++) {
    float *row = qkv + t * width;
    for (long head = 0; head < heads + kv_heads; head++) {
      const void *weight = head < heads ? q_norm : k_norm;
      if (weight) norm(row + head * dim, row + head * dim, weight, norm_type, dim, eps);
      rotate(row + head * dim, cos + t * rope_stride, sin + t * rope_stride, dim);
    }
    if (slots[t] < 0) continue;
    narrow_to((char *)keys + slots[t] * kv_size * (long)size_of(type), row + heads * dim, kv_size, type);
    narrow_to((char *)values + slots[t] * kv_size * (long)size_of(type), row + heads * dim + kv_size, kv_size, type);
  }
}

/* Rows of a matrix in tiles or in torch's layout. Returns 0, or 1 if memory ran out. */
API int shoal_embed(float *out, const void *weight, int type, int tiled, const int64_t *ids, long tokens, long n,
                    int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads_for(threads, tokens * n)) reduction(| : failed)
  {
    char *scratch = tiled ? malloc(n * (long)size_of(type)) : NULL;
    failed = tiled && !scratch;
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++) {
      const char *from = at(weight, ids[t] * n, type);
      if (failed) continue;
      if (tiled) tiled_row(scratch, weight, ids[t], n * (long)size_of(type)), from = scratch;
      for (long i = 0; i < n; i++) out[t * n + i] = load_one(at(from, i, type), type);
    }
    free(scratch);
  }
  return failed;
}

/* the same for 8-bit weights with a scale per row */
API int shoal_embed8(float *out, const int8_t *weight, int tiled, const float *scales, const int64_t *ids, long tokens,
                     long n, long padded, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads_for(threads, tokens * n)) reduction(| : failed)
  {
    int8_t *scratch = tiled ? malloc(padded) : NULL;
    failed = tiled && !scratch;
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++) {
      const int8_t *from = weight + ids[t] * padded;
      if (failed) continue;
      if (tiled) tiled_row(scratch, (const char *)weight, ids[t], padded), from = scratch;
      for (long i = 0; i < n; i++) out[t * n + i] = (float)from[i] * scales[ids[t]];
    }
    free(scratch);
  }
  return failed;
}
