/* All layers of a pass in one call: the functions of the other files in the order of a decoder layer with attention and
 * a gated MLP. Part of native.c. structs.py mirrors the structs. */

typedef struct {
  Matrix qkv, out, gate_up, down;
  const void *attention_norm, *mlp_norm, *q_norm, *k_norm; /* the last two: or NULL */
  void *keys, *values;
  long heads, kv_heads, dim, window;
  float eps, scale;
  int norm_type, cache_type;
} Layer;

typedef struct {
  float *residual, *normed, *qkv, *mixed, *gate_up, *inner; /* the first is updated, the others are scratch */
  const float *cos, *sin;
  const int64_t *slots, *tables, *starts, *contexts;
  long tokens, rope_stride, table_width, sequences, block_size;
  int threads;
} Pass;

static int product(float *out, const float *x, const Matrix *m, const float *residual, const Pass *p) {
  if (m->type == BLOCKS4 || m->type == BLOCKS8)
    return shoal_linear_blocks(out, x, m, residual, p->tokens, p->threads);
  if (m->type == INT8)
    return shoal_linear8(out, x, m->weight, m->tiled, m->scales, m->bias, m->bias_type, residual, p->tokens, m->inputs,
                         m->padded, m->outputs, p->threads);
  return shoal_linear(out, x, m->weight, m->type, m->tiled, m->bias, m->bias_type, residual, p->tokens, m->inputs,
                      m->outputs, p->threads);
}

#if HAS_TILES
/* a linear layer with weights in tiles */
static TiledLinear tiled_product(float *out, const float *x, const Matrix *m, const Pass *p) {
  TiledLinear work = {.weight = m->weight, .x = x, .bias = m->bias, .bias_type = m->bias_type, .out = out,
                      .rows = p->tokens, .inputs = m->inputs, .outputs = m->outputs, .tiled = 1};
  work.row_bytes = m->type == INT8 ? m->padded : m->inputs * 2;
  return work;
}

/* the same with a normed x, which is never stored */
static TiledLinear normed_product(float *out, const Matrix *m, const void *norm, const Layer *l, const Pass *p) {
  TiledLinear work = tiled_product(out, p->residual, m, p);
  work.norm = norm, work.norm_type = l->norm_type, work.eps = l->eps;
  return work;
}

static int run_tiled(TiledLinear *work, const Matrix *m, const Pass *p) {
  if (m->type == INT8 && !reserve_bytes(work, m->scales)) return 1;
  return linear_tiled(work, p->threads);
}
#endif

#if HAS_LANES
static int in_lanes(const Matrix *m) { return m->tiled && has_lanes(m->type); }

/* a linear layer with a normed x, which is never stored */
static LaneLinear normed_lanes(float *out, const Matrix *m, const void *norm, const Layer *l, const Pass *p) {
  long row_bytes = m->type == INT8 ? m->padded : m->inputs * (long)size_of(m->type);
  return (LaneLinear){.weight = m->weight, .row_bytes = row_bytes, .x = p->residual, .norm = norm,
                      .norm_type = l->norm_type, .eps = l->eps, .scales = m->scales, .bias = m->bias,
                      .bias_type = m->bias_type, .out = out, .rows = p->tokens, .inputs = m->inputs,
                      .outputs = m->outputs, .type = m->type};
}
#endif

static int projected(const Layer *l, const Pass *p) {
#if HAS_LANES
  if (in_lanes(&l->qkv)) {
    LaneLinear work = normed_lanes(p->qkv, &l->qkv, l->attention_norm, l, p);
    return linear_lanes(&work, p->threads);
  }
#endif
#if HAS_TILES
  if (l->qkv.tiled) {
    TiledLinear work = normed_product(p->qkv, &l->qkv, l->attention_norm, l, p);
    return run_tiled(&work, &l->qkv, p);
  }
#endif
  shoal_rms_norm(p->normed, p->residual, l->attention_norm, l->norm_type, p->tokens, l->qkv.inputs, l->eps, p->threads);
  return product(p->qkv, p->normed, &l->qkv, NULL, p);
}

/* the MLP: silu of gate_up's first half times its second half, then down */
static int gated(const Layer *l, const Pass *p) {
#if HAS_LANES
  if (in_lanes(&l->gate_up) && l->gate_up.outputs % (2 * TILE_ROWS) == 0) { /* the two halves are never stored */
    LaneLinear up = normed_lanes(p->inner, &l->gate_up, l->mlp_norm, l, p);
    up.gated = 1;
    return linear_lanes(&up, p->threads) | product(p->residual, p->inner, &l->down, p->residual, p);
  }
#endif
#if HAS_TILES
  if (l->gate_up.tiled && l->gate_up.outputs % (2 * TILE_ROWS) == 0) { /* the two halves are never stored */
    int narrow = l->down.tiled && l->down.type == BFLOAT16 && l->gate_up.type == BFLOAT16;
    TiledLinear up = normed_product(p->inner, &l->gate_up, l->mlp_norm, l, p);
    TiledLinear down = tiled_product(p->residual, p->inner, &l->down, p);
    up.gated = 1, down.residual = p->residual;
    /* bfloat16 rows padded to 16 take no more memory than the float32 rows would */
    if (narrow) up.made = down.ready = (char *)p->inner, down.is_ready = 1;
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
                     p->cos, p->sin, p->rope_stride, l->keys, l->values, l->cache_type, p->slots, p->threads);
  failed |= shoal_attention(p->mixed, p->qkv, q_stride, l->keys, l->values, l->cache_type, p->tables, p->table_width,
                            p->starts, p->contexts, p->sequences, l->heads, l->kv_heads, l->dim, p->block_size,
                            l->scale, l->window, p->threads);
  failed |= product(p->residual, p->mixed, &l->out, p->residual, p);
  return failed | gated(l, p);
}

/* Returns 0, or 1 if memory ran out. */
API int shoal_layers(const Layer *layers, long count, const Pass *p) {
  for (long n = 0; n < count; n++)
    if (layer(layers + n, p)) return 1;
  return 0;
}
