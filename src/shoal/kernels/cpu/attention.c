/* Ragged paged attention: one block of rows against the keys and values of its sequence. Part of native.c.
 *
 * The rows of a block are the queries of a sequence times the query heads of a KV head. Keys and values are read in
 * place, through the block table, in tiles of TILE tokens counted from the beginning of the sequence, with a running
 * softmax. Every PIECE tokens the softmax starts anew and its result is merged with what came before: a long past can
 * be shared among threads, or not, with bit-identical results.
 *
 * Here a row's keys, or its values, are in the lanes of a vector: for few rows. Many rows: see attention_lanes.c, and
 * attention_tiles.c for AMX. */

enum { TILE = 64, PIECE = 512, MOST_ROWS = 32, MOST_DIM = 256, MANY_ROWS = HAS_LANES ? 4 * MOST_ROWS : MOST_ROWS };
/* computed at once: rows and keys of scores, vectors of sums, vectors of exponentials; AVX2 has half the registers */
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

/* whether it is computed in AMX tiles */
INLINE int in_tiles(const Attention *a) { return HAS_TILES && a->type == BFLOAT16 && a->dim % 32 == 0; }

/* A block of rows: `queries` queries from `first` on, times `count` query heads from `head` on. The block of a single
 * query may cover several KV heads. */
typedef struct {
  long sequence, kv_head, kv_heads, head, count, first, queries, piece; /* piece: only this one; below 0: all */
  float *partial;                                                       /* result of the piece */
} Block;

/* running softmax of the rows: largest score, sum of exponentials, sum of values weighted by them */
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

/* keys or values of a tile: token t is at start + offsets[t], in elements of the cache's type */
typedef struct {
  const void *start;
  const long *offsets;
} Tokens;

INLINE const void *token(Tokens from, long t, int type) { return at(from.start, from.offsets[t], type); }

/* memory to prefetch: `bytes` bytes of each of some tokens, in memory order */
typedef struct {
  const char *start;
  const long *offsets; /* as those of Tokens */
  long token, last, byte, bytes, size;
} Prefetch;

/* Prefetch the next lines: blocks are scattered, so the CPU cannot predict the next address. It keeps only so many
 * lines in flight (about 20 on a Neoverse-N1, judging by its speed), so the requests are spread evenly over the
 * computation. AMX tiles read so much of so many tokens at once that the L1 cache would not hold it. */
INLINE void prefetch_lines(Prefetch *ahead, long lines) {
  for (; lines > 0 && ahead->token < ahead->last; lines--) {
    __builtin_prefetch(ahead->start + ahead->offsets[ahead->token] * ahead->size + ahead->byte, 0, HAS_TILES ? 2 : 3);
    ahead->byte += 64;
    if (ahead->byte >= ahead->bytes) ahead->byte = 0, ahead->token++;
  }
}

INLINE long lines_of(long values, int type) { return (values * (long)size_of(type) + 63) / 64; }

/* Scores of some rows of queries and `count` keys. Each sum runs over dim in LANES lanes from left to right, then the
 * lanes are added: the same for every number of rows and keys, and for keys that were widened before. */
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

/* adds `count` more tokens to the sums of `mix` */
INLINE void mix_step(floats sums[][MOST_VECTORS], const float *shares, Tokens values, long t, int type, long offset,
                     int rows, int vectors, int count) {
  floats share[SOME_ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < rows && count == 4 && LANES == 4; i++) share[i] = load(shares + i * TILE + t);
#pragma GCC unroll 4
  for (int n = 0; n < count; n++) {
    const void *line = at(token(values, t + n, type), offset, type);
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

/* some rows of sums of values times their shares, from value `offset` on; token by token for any number of rows */
INLINE void mix(float *to, const float *shares, const float *rescale, Tokens values, Prefetch *ahead, long first,
                long last, int type, long dim, long offset, int rows, int vectors) {
  floats sums[SOME_ROWS][MOST_VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) sums[i][v] = load(to + i * dim + offset + v * LANES) * all(rescale[i]);
  long t = first;
  for (; t + 4 <= last; t += 4) {
    prefetch_lines(ahead, lines_of(4 * vectors * LANES, type));
    mix_step(sums, shares, values, t, type, offset, rows, vectors, 4);
  }
  for (; t < last; t++) mix_step(sums, shares, values, t, type, offset, rows, vectors, 1);
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) store(to + i * dim + offset + v * LANES, sums[i][v]);
}

/* One function for every type and number of rows. score: several KV heads with `rows` rows each; keys are read from
 * first, rounded down, to last, rounded up. */
typedef void Score(const float *, Tokens, Prefetch *, long, long, long, long, float *);
typedef void Mix(float *, const float *, const float *, Tokens, Prefetch *, long, long, long);
#define ATTEND(type, rows)                                                                                          \
  static void score_##type##_##rows(const float *q, Tokens keys, Prefetch *ahead, long first, long last, long dim,     \
                                    long heads, float *scores) {                                                    \
    enum { COUNT = rows > 2 ? 4 : MOST_KEYS };                                                                      \
    for (long t = first / COUNT * COUNT; t < last; t += COUNT)                                                      \
      for (long h = 0; h < heads; h++) {                                                                            \
        Tokens here = {at(keys.start, h * dim, type), keys.offsets};                                                 \
        prefetch_lines(ahead, lines_of(COUNT * dim, type));                                                         \
        score(q + h * rows * dim, here, t, type, dim, rows, COUNT, scores + h * rows * TILE);                       \
      }                                                                                                             \
  }                                                                                                                 \
  static void mix_##type##_##rows(float *to, const float *shares, const float *rescale, Tokens values,              \
                                  Prefetch *ahead, long first, long last, long dim) {                                  \
    enum { VECTORS = MIX_VECTORS * (4 / rows) };                                                                     \
    long offset = 0;                                                                                                 \
    for (; offset + VECTORS * LANES <= dim; offset += VECTORS * LANES)                                                \
      mix(to, shares, rescale, values, ahead, first, last, type, dim, offset, rows, VECTORS);                        \
    for (; offset + 2 * LANES <= dim; offset += 2 * LANES)                                                            \
      mix(to, shares, rescale, values, ahead, first, last, type, dim, offset, rows, 2);                              \
    if (offset < dim) mix(to, shares, rescale, values, ahead, first, last, type, dim, offset, rows, 1);               \
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
static Score *const scorers[][SOME_ROWS] = {OF_TYPE(score, FLOAT32), OF_TYPE(score, BFLOAT16),
                                            OF_TYPE(score, FLOAT16)};
static Mix *const mixers[][SOME_ROWS] = {OF_TYPE(mix, FLOAT32), OF_TYPE(mix, BFLOAT16), OF_TYPE(mix, FLOAT16)};

/* the larger of each lane; NaN in x is ignored */
INLINE floats larger(floats x, floats best) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  return (floats)vmaxnmq_f32((float32x4_t)x, (float32x4_t)best);
#elif defined(__AVX512F__)
  return (floats)_mm512_max_ps((__m512)x, (__m512)best);
#else
  return choose(x > best, x, best);
#endif
}

/* As `exponential`, for TOGETHER vectors with no value above 0; 0 below -87.7. Except with AVX-512, each step is done
 * for all vectors before the next step, because a CPU does not look far enough ahead to overlap whole vectors (one at a
 * time, a vector of 4 took some 36 cycles on a Neoverse-N1 in a sampled profile). */
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
  EACH(x[n] = p[n] * (floats)(((ints)shifted[n] + 127) << 23)); /* 2^-127 becomes 0 */
#undef EACH
#endif
}

/* scores outside first..last - 1 and before `end` become -infinity */
INLINE void mask_outside(float *scores, long first, long last, long end) {
  if (first <= 0 && last >= end) return;
  if (end == 0) return; /* the row sees nothing of the tile, and last is before it */
#if defined(__AVX512F__)
  uint64_t kept = last < TILE ? ((uint64_t)1 << last) - 1 : ~(uint64_t)0;
  if (first > 0) kept &= first < TILE ? ~(uint64_t)0 << first : 0;
  for (long t = 0; t < end; t += LANES) /* whole vectors: a load of partly stored data would stall */
    store(scores + t,
          (floats)_mm512_mask_mov_ps((__m512)all(-INFINITY), (__mmask16)(kept >> t), (__m512)load(scores + t)));
#else
  for (long t = 0; t < first && t < end; t++) scores[t] = -INFINITY;
  for (long t = last; t < end; t++) scores[t] = -INFINITY;
#endif
}

/* Scores of tokens that a row may not see become -infinity; returns its largest score so far. `width`: how much of the
 * tile it sees, rounded up to whole steps. */
static float mask(float *scores, long from, long position, long window, float top, long *width) {
  enum { STEP = TOGETHER * LANES };
  long last = position - from, first = window ? last - window + 1 : 0; /* the row sees first..last of this tile */
  long end = last < 0 ? 0 : last + 1 > TILE ? TILE : (last + STEP) / STEP * STEP;
  mask_outside(scores, first, last + 1, end);
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

/* scores of one row become exponentials, 0 for tokens that it may not see; returns their sum */
static float exponentiate(float *scores, long width, float base) {
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

/* offsets of a tile's tokens in keys and values, in elements of the cache's type; incremental, because a division per
 * token would cost more than the rest */
static void find_tokens(const Attention *a, const Block *b, long from, long first, long last, long *offsets) {
  const int64_t *table = a->tables + b->sequence * a->table_width + (from + first) / a->block_size;
  long offset = (from + first) % a->block_size, line = a->kv_heads * a->dim;
  for (long t = first; t < last; t++) {
    offsets[t] = (*table * a->block_size + offset) * line + b->kv_head * a->dim;
    if (++offset == a->block_size) offset = 0, table++;
  }
}

/* position of the block's first query */
static long first_position(const Attention *a, const Block *b) {
  long queries = a->starts[b->sequence + 1] - a->starts[b->sequence];
  return a->contexts[b->sequence] - queries + b->first;
}

/* the oldest position that any query of the block sees */
static long oldest_of(const Attention *a, const Block *b) {
  long position = first_position(a, b);
  return a->window && position - a->window + 1 > 0 ? position - a->window + 1 : 0;
}

/* The softmax of all rows of a block. Each step is done for all rows before the next one, so that no row waits for its
 * own largest score. */
static void softmax_rows(const Attention *a, const Block *b, long rows, long from, float *scores, Seen *seen,
                         float *rescale) {
  long position = first_position(a, b), widths[MOST_ROWS];
  float now[MOST_ROWS], *top = seen->top, *mass = seen->mass;
  for (long r = 0; r < rows; r++)
    now[r] = mask(scores + r * TILE, from, position + r / b->count, a->window, top[r], widths + r);
  for (long r = 0; r < rows; r++) rescale[r] = top[r] - base_of(now[r]);
  for (long r = 0; r < rows; r += LANES) store(rescale + r, exponential(load(rescale + r)));
  for (long r = 0; r < rows; r++) {
    float total = exponentiate(scores + r * TILE, widths[r], base_of(now[r]));
    mass[r] = fused_one(mass[r], rescale[r], total), top[r] = now[r];
  }
}

/* the tokens of a tile that a block sees: first..last - 1, relative to position `from` */
typedef struct {
  long from, first, last, offsets[TILE];
} Tile;

/* the tile at position `from` of a piece that ends at `end` */
static void find_tile(const Attention *a, const Block *b, long from, long end, Tile *tile) {
  long oldest = oldest_of(a, b);
  long first = oldest > from ? oldest - from : 0, last = end - from < TILE ? end - from : TILE;
  tile->from = from, tile->first = first, tile->last = last;
  find_tokens(a, b, from, first, last, tile->offsets);
  /* keys are scored in groups: the nearest token fills up a group, and its score is dropped */
  for (long t = first / MOST_KEYS * MOST_KEYS; t < first; t++) tile->offsets[t] = tile->offsets[first];
  for (long t = last; t % MOST_KEYS; t++) tile->offsets[t] = tile->offsets[last - 1];
}

/* finds the first tile of a piece; returns where the piece ends */
static long first_tile(const Attention *a, const Block *b, long piece, Tile *tile) {
  long oldest = oldest_of(a, b), newest = first_position(a, b) + b->queries - 1;
  long begin = piece * PIECE, end = begin + PIECE < newest + 1 ? begin + PIECE : newest + 1;
  find_tile(a, b, oldest > begin ? oldest / TILE * TILE : begin, end, tile);
  return end;
}

/* finds the tile after `tile` of a piece that ends at `end`; returns the block that it belongs to, or NULL */
static const Block *next_tile(const Attention *a, const Block *b, const Tile *tile, long end, const Block *next,
                              Tile *found) {
  if (tile->from + TILE < end) {
    find_tile(a, b, tile->from + TILE, end, found);
    return b;
  }
  if (next) first_tile(a, next, next->piece < 0 ? oldest_of(a, next) / PIECE : next->piece, found);
  return next;
}

static Prefetch prefetch_of(const Attention *a, const Block *b, const void *cache, const Tile *tile) {
  long size = (long)size_of(a->type);
  return (Prefetch){cache, tile->offsets, tile->first, tile->last, 0, b->kv_heads * a->dim * size, size};
}

/* contiguous float32 copy of a tile's keys or values */
typedef struct {
  float values[TILE * MOST_DIM];
  long offsets[TILE];
} Copy;

/* If many rows use a tile, 16-bit values are widened once; float32 is copied if tokens are so far apart that all of
 * them map to the same cache sets (at 4 KiB that cost a sixth of a prompt's time on a Neoverse-N1). */
static int is_copied(const Attention *a, long rows) {
  return rows > SOME_ROWS && (a->type != FLOAT32 || a->kv_heads * a->dim * 4 % 2048 == 0);
}

/* keys or values of a tile, from a KV head of the block on: in the KV cache, or a copy */
static Tokens tokens_of(const Attention *a, const Tile *tile, const void *cache, long head, Copy *copy) {
  Tokens found = {at(cache, head * a->dim, a->type), tile->offsets};
  if (!copy) return found;
  for (long t = tile->first / MOST_KEYS * MOST_KEYS; t < tile->last || t % MOST_KEYS; t++) {
    float *to = copy->values + t * a->dim;
    const float *wide = widened(token(found, t, a->type), a->type, a->dim, to);
    if (wide != to) memcpy(to, wide, sizeof(float) * a->dim);
    copy->offsets[t] = t * a->dim;
  }
  return (Tokens){copy->values, copy->offsets};
}

/* `each`: rows per KV head. If there are few, token by token through all KV heads, in memory order. */
static void score_rows(const Attention *a, const Block *b, const Tile *tile, const float *q, long each, Copy *copy,
                       Prefetch *ahead, float *scores) {
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
                     Prefetch *ahead, const float *scores, const float *rescale) {
  for (long h = 0; h < b->kv_heads; h++) {
    Tokens values = tokens_of(a, tile, a->values, h, copy);
    for (long done = 0; done < each; done += SOME_ROWS) {
      long these = each - done < SOME_ROWS ? each - done : SOME_ROWS, r = h * each + done;
      mixers[copy ? FLOAT32 : a->type][these - 1](mixed + r * a->dim, scores + r * TILE, rescale + r, values, ahead,
                                                  tile->first, tile->last, a->dim);
    }
  }
}

/* next: the thread's next block, or NULL */
static void attend_piece(const Attention *a, const Block *b, const float *q, long rows, long piece, const Block *next,
                         Seen *seen) {
  long each = rows / b->kv_heads;
  float scores[MOST_ROWS * TILE], rescale[MOST_ROWS] = {0};
  Copy scratch, *copy = is_copied(a, each) ? &scratch : NULL;
  Tile tiles[2];
  long end = first_tile(a, b, piece, tiles);
  for (int current = 0, more = 1; more; current = !current) {
    const Tile *tile = tiles + current;
    Tile *then = tiles + !current;
    Prefetch ahead = prefetch_of(a, b, a->values, tile);
    score_rows(a, b, tile, q, each, copy, &ahead, scores);
    softmax_rows(a, b, rows, tile->from, scores, seen, rescale);
    more = tile->from + TILE < end;
    const Block *after = next_tile(a, b, tile, end, next, then);
    ahead.last = 0;
    if (after) ahead = prefetch_of(a, after, a->keys, then);
    mix_rows(a, b, tile, seen->mixed, each, copy, &ahead, scores, rescale);
  }
}
