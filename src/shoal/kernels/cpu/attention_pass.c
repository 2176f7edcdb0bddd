/* Ragged paged attention: a pass is split into blocks, threads compute them, pieces are merged. Part of native.c. */

/* rows of queries in the layouts that the kernels of a block read */
typedef struct {
  float wide[MOST_ROWS * MOST_DIM];
  char transposed[HAS_LANES ? MANY_ROWS * MOST_DIM * 4 : 1] IN_LINES; /* for tiles, in bfloat16, or for lanes */
} Queries;

/* row r of a block */
INLINE void take_query(const Attention *a, const Block *b, long r, float *to) {
  long token = a->starts[b->sequence] + b->first + r / b->count;
  const float *from = a->q + token * a->q_stride + (b->head + r % b->count) * a->dim;
  for (long i = 0; i < a->dim; i += LANES) store(to + i, load(from + i) * all(a->scale));
}

#if HAS_LANES
/* the rows in groups, transposed; the last group is padded with zeros */
static void take_groups(const Attention *a, const Block *b, long rows, Queries *q) {
  long dim = a->dim;
  float *to = (float *)q->transposed;
  for (long first = 0; first < rows; first += GROUP, to += GROUP * dim) {
    for (long r = 0; r < GROUP; r++)
      if (first + r < rows)
        take_query(a, b, first + r, q->wide + r * dim);
      else
        memset(q->wide + r * dim, 0, sizeof(float) * dim);
    for (long i = 0; i < dim; i += GROUP)
      transpose16_to((uint32_t *)(to + i * GROUP), GROUP, (const char *)(q->wide + i), dim * 4);
  }
}
#endif

static void take_queries(const Attention *a, const Block *b, long rows, Queries *q) {
#if HAS_LANES
  if (in_bands(a, b, rows)) {
    take_groups(a, b, rows, q);
    return;
  }
#endif
#if HAS_TILES
  if (in_tiles(a) && rows > GROUP * b->kv_heads) {
    for (long first = 0; first < rows || first % PART; first += GROUP) { /* parts are padded with zeros */
      for (long r = 0; r < GROUP; r++)
        if (first + r < rows)
          take_query(a, b, first + r, q->wide + r * a->dim);
        else
          memset(q->wide + r * a->dim, 0, sizeof(float) * a->dim);
      transpose_queries(q->transposed + first * a->dim * 2, q->wide, GROUP, a->dim, 1);
    }
    shape_attention(GROUP);
    return;
  }
#endif
  for (long r = 0; r < rows; r++) take_query(a, b, r, q->wide + r * a->dim);
#if HAS_TILES
  if (in_tiles(a)) {
    transpose_queries(q->transposed, q->wide, rows, a->dim, b->kv_heads);
    shape_attention(rows / b->kv_heads);
  }
#endif
}

static void see_piece(const Attention *a, const Block *b, const Queries *q, long rows, long piece, const Block *next,
                      Seen *seen) {
  for (long r = 0; r < rows; r++) seen->top[r] = -INFINITY, seen->mass[r] = 0;
#if HAS_TILES
  if (in_tiles(a) && rows > GROUP * b->kv_heads) {
    attend_many(a, b, q->transposed, rows, piece, seen);
    return;
  }
#endif
#if HAS_LANES
  if (in_bands(a, b, rows)) {
    attend_bands(a, b, (const float *)q->transposed, rows, piece, next, seen);
    return;
  }
#endif
  memset(seen->mixed, 0, sizeof(float) * rows * a->dim);
#if HAS_TILES
  if (in_tiles(a)) {
    attend_few(a, b, q->transposed, rows, piece, next, seen);
    return;
  }
#endif
  attend_piece(a, b, q->wide, rows, piece, next, seen);
}

/* merges the softmax of one row with that of a later piece */
static void join(float *top, float *mass, float *mixed, float later_top, float later_mass, const float *later,
                 long dim) {
  float best = later_top > *top ? later_top : *top, base = best == -INFINITY ? 0 : best;
  float before = exponential_one(*top - base), after = exponential_one(later_top - base);
  for (long i = 0; i < dim; i += LANES)
    store(mixed + i, fused(load(mixed + i), all(before), load(later + i) * all(after)));
  *mass = fused_one(*mass, before, later_mass * after);
  *top = best;
}

static void finish(const Attention *a, const Block *b, long rows, const float *mass, const float *mixed) {
  for (long r = 0; r < rows; r++) {
    long token = a->starts[b->sequence] + b->first + r / b->count;
    float *out = a->out + (token * a->heads + b->head + r % b->count) * a->dim;
    floats scale = all(1 / mass[r]);
    for (long i = 0; i < a->dim; i += LANES) store(out + i, load(mixed + r * a->dim + i) * scale);
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

/* merges all pieces of a block, in order; they are contiguous from the first one's `partial` on */
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

/* How a pass is split: KV heads per block of a single query, and rows per block of a stretch of queries. */
typedef struct {
  long heads, rows;
} BlockShape;

/* The blocks of a pass, roughly those with most work first: stretches of queries, one KV head after the other because
 * its keys and values stay in cache, from the last query to the first; then single queries, whose past is split into
 * pieces if it is long. Returns their number; with blocks = NULL it only counts them and the floats of partial
 * results. */
static long make_blocks(const Attention *a, BlockShape how, Block *blocks, float *partial, long *floats_needed) {
  long group = a->heads / a->kv_heads, count = group < MOST_ROWS ? group : MOST_ROWS, found = 0, used = 0;
  for (int single = 0; single < 2; single++)
    for (long s = 0; s < a->sequences; s++) {
      long queries = a->starts[s + 1] - a->starts[s], step = how.rows / count, some = single ? how.heads : 1;
      if (queries < 1 || (queries == 1) != single) continue;
      for (long kv_head = 0; kv_head < a->kv_heads; kv_head += some)
        for (long last = queries; last > 0; last -= step)
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

/* How many KV heads of a single query go into one block: those of a token are adjacent in memory, but there must be
 * enough blocks for all threads. */
static long heads_together(const Attention *a, int threads) {
  long group = a->heads / a->kv_heads, most = MOST_ROWS / group, singles = 0;
#if HAS_TILES
  if (in_tiles(a) && group > GROUP) return 1;
#endif
  for (long s = 0; s < a->sequences; s++)
    singles += a->starts[s + 1] - a->starts[s] == 1 ? a->contexts[s] / PIECE + 1 : 0;
  if (most > a->kv_heads) most = a->kv_heads;
  while (most > 1 && singles * (a->kv_heads / most) < 4 * threads) most--;
  return most > 1 ? most : 1;
}

/* How many rows of a stretch go into one block: its tiles are prepared once, but there must be enough for all
 * threads. */
static long rows_together(const Attention *a, int threads) {
#if HAS_LANES
  for (long rows = MANY_ROWS; a->dim % GROUP == 0 && rows > MOST_ROWS; rows /= 2) {
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

/* the pieces of a call are its blocks */
typedef struct {
  const Attention *attention;
  const Block *blocks;
  long count;
  int threads;
} AttentionPieces;

static void attention_piece(void *work, long n) {
  const AttentionPieces *p = work;
  long next = n + p->threads; /* what this thread computes next, if all are equally fast; its memory is prefetched */
  attend(p->attention, p->blocks + n, next < p->count ? p->blocks + next : NULL);
#if HAS_TILES
  if (in_tiles(p->attention)) tiles_end();
#endif
}

static void join_piece(void *work, long n) {
  const AttentionPieces *p = work;
  const Block *b = p->blocks + n;
  int starts_here = b->piece >= 0 && b->piece == oldest_of(p->attention, b) / PIECE;
  if (starts_here) join_pieces(p->attention, b, first_position(p->attention, b) / PIECE - b->piece + 1);
}

/* Returns 0, or 1 if memory ran out. */
API int shoal_attention(float *out, const float *q, long q_stride, const void *keys, const void *values, int type,
                        const int64_t *tables, long table_width, const int64_t *starts, const int64_t *contexts,
                        long sequences, long heads, long kv_heads, long dim, long block_size, float scale, long window,
                        int threads) {
  Attention a = {out,         q,         keys,  values,   tables, starts,     contexts, q_stride,
                 table_width, sequences, heads, kv_heads, dim,    block_size, window,   scale,  type};
  BlockShape how = {heads_together(&a, threads), rows_together(&a, threads)};
  long needed, count = make_blocks(&a, how, NULL, NULL, &needed);
  Block *blocks = malloc(sizeof(Block) * (count + 1));
  float *partial = malloc(sizeof(float) * (needed + LANES));
  if (!blocks || !partial) {
    free(blocks), free(partial);
    return 1;
  }
  make_blocks(&a, how, blocks, partial, &needed);
  AttentionPieces pieces = {&a, blocks, count, threads};
  share(threads, count, attention_piece, &pieces);
  if (needed) share(threads_for(threads, needed), count, join_piece, &pieces);
  free(blocks), free(partial);
  return 0;
}
