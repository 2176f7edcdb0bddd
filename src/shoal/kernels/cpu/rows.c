/* Operations on single rows: norms, SwiGLU, rotary embedding with KV writes, embedding lookup. Part of native.c. */

typedef struct {
  float *out;
  const float *x;
  const void *weight;
  long n;
  float eps;
  int type;
} Norms;

static void norm_rows(const void *work, long first, long count) {
  const Norms *w = work;
  for (long r = first; r < first + count; r++)
    norm(w->out + r * w->n, w->x + r * w->n, w->weight, w->type, w->n, w->eps);
}

API void shoal_rms_norm(float *out, const float *x, const void *weight, int type, long rows, long n, float eps,
                        int threads) {
  Norms work = {out, x, weight, n, eps, type};
  share_rows(threads, rows, n, norm_rows, &work);
}

typedef struct {
  float *out;
  const float *gate_up;
  long n;
} Gates;

static void gate_rows(const void *work, long first, long count) {
  const Gates *w = work;
  long n = w->n;
  for (long r = first; r < first + count; r++) {
    const float *gate = w->gate_up + r * 2 * n, *up = gate + n;
    float *to = w->out + r * n;
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, silu(load(gate + i)) * load(up + i));
    for (; i < n; i++) to[i] = gate[i] / (1 + exponential_one(-gate[i])) * up[i];
  }
}

API void shoal_silu_mul(float *out, const float *gate_up, long rows, long n, int threads) {
  Gates work = {out, gate_up, n};
  share_rows(threads, rows, n, gate_rows, &work);
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

typedef struct {
  float *qkv;
  long heads, kv_heads, dim;
  const void *q_norm, *k_norm;
  const float *cos, *sin;
  long rope_stride;
  void *keys, *values;
  const int64_t *slots;
  float eps;
  int norm_type, type;
} Rotations;

static void rotate_rows(const void *work, long first, long count) {
  const Rotations *w = work;
  long heads = w->heads, dim = w->dim, width = (heads + 2 * w->kv_heads) * dim, kv_size = w->kv_heads * dim;
  long kv_bytes = kv_size * (long)size_of(w->type);
  for (long t = first; t < first + count; t++) {
    float *row = w->qkv + t * width;
    for (long head = 0; head < heads + w->kv_heads; head++) {
      const void *weight = head < heads ? w->q_norm : w->k_norm;
      if (weight) norm(row + head * dim, row + head * dim, weight, w->norm_type, dim, w->eps);
      rotate(row + head * dim, w->cos + t * w->rope_stride, w->sin + t * w->rope_stride, dim);
    }
    if (w->slots[t] < 0) continue;
    narrow_to((char *)w->keys + w->slots[t] * kv_bytes, row + heads * dim, kv_size, w->type);
    narrow_to((char *)w->values + w->slots[t] * kv_bytes, row + heads * dim + kv_size, kv_size, w->type);
  }
}

/* Queries are rotated in place; keys and values are written into the KV cache. */
API void shoal_rotate_store(float *qkv, long tokens, long heads, long kv_heads, long dim, const void *q_norm,
                            const void *k_norm, int norm_type, float eps, const float *cos, const float *sin,
                            long rope_stride, void *keys, void *values, int type, const int64_t *slots, int threads) {
  Rotations work = {qkv, heads, kv_heads, dim,   q_norm, k_norm,    cos, sin, rope_stride,
                    keys, values, slots,  eps, norm_type, type};
  share_rows(threads, tokens, (heads + 2 * kv_heads) * dim, rotate_rows, &work);
}

/* rows of an embedding; those in tiles are first copied to scratch memory */
typedef struct {
  float *out;
  const void *weight;
  const float *scales; /* of 8-bit weights */
  const int64_t *ids;
  long n, row_bytes;
  int type, tiled;
  _Atomic int *failed;
} Lookups;

static const char *looked_up(const Lookups *w, long t) {
  if (!w->tiled) return (const char *)w->weight + w->ids[t] * w->row_bytes;
  char *scratch = scratch_for(SCRATCH_PANELS, w->row_bytes);
  if (scratch) tiled_row(scratch, w->weight, w->ids[t], w->row_bytes);
  return scratch;
}

static void embed_rows(const void *work, long first, long count) {
  const Lookups *w = work;
  for (long t = first; t < first + count; t++) {
    const char *from = looked_up(w, t);
    if (!from) *w->failed = 1;
    for (long i = 0; from && i < w->n; i++) w->out[t * w->n + i] = load_one(at(from, i, w->type), w->type);
  }
}

static void embed8_rows(const void *work, long first, long count) {
  const Lookups *w = work;
  for (long t = first; t < first + count; t++) {
    const int8_t *from = (const int8_t *)looked_up(w, t);
    if (!from) *w->failed = 1;
    for (long i = 0; from && i < w->n; i++) w->out[t * w->n + i] = (float)from[i] * w->scales[w->ids[t]];
  }
}

/* Rows of a matrix in tiles or in torch's layout. Returns 0, or 1 if memory ran out. */
API int shoal_embed(float *out, const void *weight, int type, int tiled, const int64_t *ids, long tokens, long n,
                    int threads) {
  _Atomic int failed = 0;
  Lookups work = {out, weight, NULL, ids, n, n * (long)size_of(type), type, tiled, &failed};
  share_rows(threads, tokens, n, embed_rows, &work);
  return failed;
}

/* the same for 8-bit weights with a scale per row */
API int shoal_embed8(float *out, const int8_t *weight, int tiled, const float *scales, const int64_t *ids, long tokens,
                     long n, long padded, int threads) {
  _Atomic int failed = 0;
  Lookups work = {out, weight, scales, ids, n, padded, 0, tiled, &failed};
  share_rows(threads, tokens, n, embed8_rows, &work);
  return failed;
}
