/* Attention in AMX tiles of 16 by 16, for KV in bfloat16 and head sizes that are multiples of 32. Part of native.c.
 *
 *     both:                   scores' = K q'         16 keys by up to 16 rows of queries, transposed once for all keys
 *     few rows (a decode):    mixed   = shares V     rows of bfloat16 shares by V, whose rows are paired on the way
 *     many rows (a prompt):   mixed'  = V' shares'   V is transposed once for all rows; shares are paired when computed
 *
 * Few rows: scores are transposed back, and the softmax of a row has its keys in the lanes of vectors, as without
 * tiles. Many rows: 16 rows are in the lanes from the scores to the end, so no row needs a sum or a maximum across
 * lanes.
 *
 * A query's result does not depend on other queries: the products of a score are the same in the same order both ways,
 * and so are those of the mixed values, since the factors of a product commute; the shares of a row are added in one
 * order; tiles of tokens are counted from the beginning of the sequence, and a token that a query does not see counts
 * 0. Few rows may read keys that none of them sees, inside the sequence's own blocks; their scores are dropped. */

#if HAS_TILES

enum { PAIRED = 32 }; /* values of 64 bytes */

/* Few rows: tiles 0, 1 scores; 2, 5 keys, then values; 3 queries; 4 shares; 6, 7 mixed. Many rows: all are full. */
static void shape_attention(long rows) {
  TileShape shape = {.palette = 1};
  int few = rows < GROUP ? (int)rows : GROUP;
  const int counts[8] = {GROUP, GROUP, GROUP, GROUP, few, GROUP, few, few};
  const int widths[8] = {few, few, GROUP, few, GROUP, GROUP, GROUP, GROUP};
  for (int n = 0; n < 8; n++) shape.rows[n] = (uint8_t)counts[n], shape.bytes[n] = (uint16_t)(widths[n] * 4);
  tiles_begin(&shape);
}

/* Up to 16 rows of queries of each KV head, rounded: for each 32 values, 16 pairs by the rows. */
static void transpose_queries(char *to, const float *q, long rows, long dim, long kv_heads) {
  long each = rows / kv_heads;
  uint32_t lines[TILE_SIZE / 4];
  for (long first = 0; first < rows; first += each)
    for (long at_dim = 0; at_dim < dim; at_dim += PAIRED, to += each * 64) {
      for (long r = 0; r < each; r++) narrow_line((uint16_t *)(lines + r * 16), q + (first + r) * dim + at_dim);
      if (each == GROUP)
        transpose16((uint32_t *)to, (const char *)lines, TILE_BYTES);
      else
        transpose_words((uint32_t *)to, lines, each, 16);
    }
}

/* Keys and values of the next tile, prefetched evenly while this one is computed: SOME lines of each at every step of
 * the products, a few with every pair of values; a third of a tile each during scoring, pairing and mixing. */
enum { SOME = 11 };

typedef struct {
  Prefetch keys, values;
} Coming;

INLINE void prefetch_both(Coming *coming, long lines) {
  prefetch_lines(&coming->keys, lines);
  prefetch_lines(&coming->values, lines);
}

static Coming coming_of(const Attention *a, const Block *b, const Tile *tile) {
  if (!b || b->queries > 1) return (Coming){{0}, {0}}; /* those of a prompt are reused often and stay in cache */
  return (Coming){prefetch_of(a, b, a->keys, tile), prefetch_of(a, b, a->values, tile)};
}

/* 16 keys from `here` on in the tile: in the KV cache, or a copy if its blocks do not hold 16 in a row */
static const char *keys_of(const Attention *a, const Tile *tile, long head, long here, char *scratch, long *stride) {
  long line = a->dim * 2, known = tile->first > here ? tile->first : here;
  const uint16_t *keys = (const uint16_t *)a->keys + head * a->dim;
  *stride = a->kv_heads * line;
  if (a->block_size % GROUP == 0)
    return (const char *)(keys + tile->offsets[known] - (known - here) * a->kv_heads * a->dim);
  *stride = line;
  memset(scratch, 0, GROUP * line);
  for (long t = known; t < here + GROUP && t < tile->last; t++)
    memcpy(scratch + (t - here) * line, keys + tile->offsets[t], line);
  return scratch;
}

/* scores of one or two groups of 16 keys and up to 16 rows: [keys, rows], one group behind the other */
INLINE void score_group(const char *const *keys, const long *stride, const char *q, long rows, long dim, int both,
                        Coming *coming, float *found) {
  long width = rows * 4;
  tile_zero(0);
  if (both) tile_zero(1);
  for (long n = 0; n < dim / PAIRED; n++) {
    prefetch_both(coming, SOME);
    tile_load(3, q + n * width * GROUP, width);
    tile_load(2, keys[0] + n * TILE_BYTES, stride[0]);
    tile_add_bfloat16(0, 2, 3);
    if (both) {
      tile_load(5, keys[1] + n * TILE_BYTES, stride[1]);
      tile_add_bfloat16(1, 5, 3);
    }
  }
  tile_store(0, found, width);
  if (both) tile_store(1, found + GROUP * rows, width);
}

/* [16 keys, rows] to rows of scores */
static void transpose_scores(float *scores, const float *found, long rows) {
  if (rows == GROUP) {
    transpose16_to((uint32_t *)scores, TILE, (const char *)found, TILE_BYTES);
    return;
  }
#if defined(__AVX512F__)
  __m512i keys = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i offsets = _mm512_mullo_epi32(keys, _mm512_set1_epi32((int)rows));
  for (long r = 0; r < rows; r++, offsets = _mm512_add_epi32(offsets, _mm512_set1_epi32(1))) {
    __m512i line = _mm512_srli_epi32(offsets, 4);
    __m512 row = _mm512_permutexvar_ps(offsets, _mm512_loadu_ps(found));
    for (int n = 1; n < rows; n++)
      row = _mm512_mask_permutexvar_ps(row, _mm512_cmpeq_epi32_mask(line, _mm512_set1_epi32(n)), offsets,
                                       _mm512_loadu_ps(found + n * GROUP));
    _mm512_storeu_ps(scores + r * TILE, row);
  }
#else
  for (long r = 0; r < rows; r++)
    for (long t = 0; t < GROUP; t++) scores[r * TILE + t] = found[t * rows + r];
#endif
}

/* all scores of a tile and a KV head, as [16 keys, rows] of each group */
static void score_tile(const Attention *a, const Tile *tile, long head, const char *q, long rows, Coming *coming,
                       float *found) {
  char scratch[2][GROUP * MOST_DIM * 2];
  for (long here = tile->first / GROUP * GROUP; here < tile->last;) {
    const char *keys[2];
    long stride[2];
    int both = here + GROUP < tile->last;
    for (int n = 0; n <= both; n++) keys[n] = keys_of(a, tile, head, here + n * GROUP, scratch[n], stride + n);
    score_group(keys, stride, q, rows, a->dim, both, coming, found + here * rows);
    here += (1 + both) * GROUP;
  }
}

/* two rows of n values, interleaved, 16 pairs to a row of a tile */
INLINE void pair_values(char *to, const uint16_t *one, const uint16_t *two, long n) {
#if defined(__AVX512BW__)
  static const uint16_t offsets[2][PAIRED] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61,
       30, 62, 31, 63}};
  __m512i low = _mm512_loadu_si512(offsets[0]), high = _mm512_loadu_si512(offsets[1]);
  for (long i = 0; i < n; i += PAIRED, to += 2 * TILE_SIZE) {
    __m512i left = _mm512_loadu_si512(one + i), right = _mm512_loadu_si512(two + i);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(left, low, right));
    _mm512_storeu_si512(to + TILE_SIZE, _mm512_permutex2var_epi16(left, high, right));
  }
#else
  for (long i = 0; i < n; i++) {
    uint16_t *row = (uint16_t *)(to + i / 16 * TILE_SIZE);
    row[i % 16 * 2] = one[i], row[i % 16 * 2 + 1] = two[i];
  }
#endif
}

/* the values of a tile of tokens: for each 32 tokens and each 16 values a tile; zeros outside first..last */
static void pair_tile(const Attention *a, const Tile *tile, long head, Coming *coming, char *to) {
  long first = tile->first, last = tile->last, few = (a->dim + 47) / 48; /* a third of a head's cache lines */
  const uint16_t *values = (const uint16_t *)a->values + head * a->dim;
  static const uint16_t zeros[MOST_DIM];
  for (long t = first / PAIRED * PAIRED; t < (last + PAIRED - 1) / PAIRED * PAIRED; t += 2) {
    const uint16_t *line[2];
    for (long n = 0; n < 2; n++)
      line[n] = t + n >= first && t + n < last ? values + tile->offsets[t + n] : zeros;
    if (coming) prefetch_both(coming, few);
    pair_values(to + t / PAIRED * a->dim * 64 + t % PAIRED / 2 * 64, line[0], line[1], a->dim);
  }
}

/* shares [up to 16 rows, TILE] times values: [the same rows, dim] */
INLINE void mix_tile(float *product, const uint16_t *share, const char *values, long dim, const Tile *tile,
                     Coming *coming) {
  for (long i = 0; i < dim; i += 2 * GROUP) {
    tile_zero(6);
    tile_zero(7);
    for (long t = tile->first / PAIRED * PAIRED; t < tile->last; t += PAIRED) {
      const char *here = values + t / PAIRED * dim * 64 + i / GROUP * TILE_SIZE;
      prefetch_both(coming, SOME);
      tile_load(4, share + t, TILE * 2);
      tile_load(5, here, TILE_BYTES);
      tile_add_bfloat16(6, 4, 5);
      tile_load(2, here + TILE_SIZE, TILE_BYTES);
      tile_add_bfloat16(7, 4, 2);
    }
    tile_store(6, product + i, dim * 4);
    tile_store(7, product + i + GROUP, dim * 4);
  }
}

/* adds the products of a tile to the rescaled sums */
INLINE void add_tile(Seen *seen, long rows, const float *rescale, const float *product, long dim) {
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < dim; i += LANES) {
      float *to = seen->mixed + r * dim + i;
      store(to, fused(load(to), all(rescale[r]), load(product + r * dim + i)));
    }
}

/* as attend_piece, with at most 16 rows per KV head */
static void attend_few(const Attention *a, const Block *b, const char *q, long rows, long piece, const Block *next,
                       Seen *seen) {
  long dim = a->dim, each = rows / b->kv_heads;
  float found[MOST_ROWS * TILE], scores[MOST_ROWS * TILE], rescale[MOST_ROWS] = {0}, product[MOST_ROWS * MOST_DIM];
  uint16_t share[MOST_ROWS * TILE];
  char values[TILE * MOST_DIM * 2];
  Tile tiles[2];
  long end = first_tile(a, b, piece, tiles);
  for (int current = 0, more = 1; more; current = !current) {
    const Tile *tile = tiles + current;
    more = tile->from + TILE < end;
    const Block *after = next_tile(a, b, tile, end, next, tiles + !current);
    Coming coming = coming_of(a, after, tiles + !current);
    for (long h = 0; h < b->kv_heads; h++)
      score_tile(a, tile, h, q + h * each * dim * 2, each, &coming, found + h * each * TILE);
    for (long h = 0; h < b->kv_heads; h++)
      for (long here = tile->first / GROUP * GROUP; here < tile->last; here += GROUP)
        transpose_scores(scores + h * each * TILE + here, found + (h * TILE + here) * each, each);
    softmax_rows(a, b, rows, tile->from, scores, seen, rescale);
    for (long t = 0; t < rows * TILE; t += PAIRED) narrow_line(share + t, scores + t);
    for (long h = 0; h < b->kv_heads; h++) {
      pair_tile(a, tile, h, &coming, values);
      mix_tile(product + h * each * dim, share + h * each * TILE, values, dim, tile, &coming);
    }
    add_tile(seen, rows, rescale, product, dim);
  }
}

/* ---- many rows, in parts of 32: a tile's keys are gathered and its values transposed once for all parts */

enum { PART = 2 * GROUP };

/* a part of the rows in a tile; for each of its two groups: scores [keys, rows], shares [pairs of keys, rows, 2] */
typedef struct {
  float scores[2][TILE * GROUP] IN_LINES, rescale[2][GROUP] IN_LINES;
  uint16_t shares[2][TILE * GROUP] IN_LINES;
} Part;

/* The keys of a tile, contiguous; zeros outside first..last - 1. In the KV cache the keys of one head may be so far
 * apart that all of them map to the same sets of the L1 cache. */
static void gather_keys(const Attention *a, const Tile *tile, char *to) {
  long line = a->dim * 2, first = tile->first, last = tile->last;
  const uint16_t *keys = a->keys;
  for (long t = first / PAIRED * PAIRED; t < (last + PAIRED - 1) / PAIRED * PAIRED; t++)
    for (long n = 0; n < line; n += TILE_BYTES)
      if (t >= first && t < last)
        memcpy(to + t * line + n, (const char *)(keys + tile->offsets[t]) + n, TILE_BYTES);
      else
        memset(to + t * line + n, 0, TILE_BYTES);
}

/* the values of a tile, transposed: for each 32 tokens and 16 values a tile; zeros outside first..last - 1 */
static void transpose_values(const Attention *a, const Tile *tile, char *to) {
  char pairs[TILE * MOST_DIM * 2] IN_LINES;
  pair_tile(a, tile, 0, NULL, pairs);
  for (long t = tile->first / PAIRED * PAIRED; t < tile->last; t += PAIRED)
    for (long n = t * a->dim * 2; n < (t + PAIRED) * a->dim * 2; n += TILE_SIZE)
      transpose16((uint32_t *)(to + n), pairs + n, TILE_BYTES);
}

/* a part's scores: two groups of keys by both groups of rows at once */
INLINE void score_part(const Tile *tile, const char *keys, const char *q, long dim, Part *part) {
  long line = dim * 2;
  for (long here = tile->first / PAIRED * PAIRED; here < tile->last; here += PAIRED) {
    const char *one = keys + here * line, *two = one + GROUP * line, *more = q + GROUP * line;
    float *found = part->scores[0] + here * GROUP, *others = part->scores[1] + here * GROUP;
    tile_zero(0);
    tile_zero(1);
    tile_zero(6);
    tile_zero(7);
    for (long n = 0; n < dim / PAIRED; n++) {
      tile_load(2, one + n * TILE_BYTES, line);
      tile_load(3, q + n * TILE_SIZE, TILE_BYTES);
      tile_add_bfloat16(0, 2, 3);
      tile_load(5, two + n * TILE_BYTES, line);
      tile_add_bfloat16(1, 5, 3);
      tile_load(4, more + n * TILE_SIZE, TILE_BYTES);
      tile_add_bfloat16(6, 2, 4);
      tile_add_bfloat16(7, 5, 4);
    }
    tile_store(0, found, TILE_BYTES);
    tile_store(1, found + GROUP * GROUP, TILE_BYTES);
    tile_store(6, others, TILE_BYTES);
    tile_store(7, others + GROUP * GROUP, TILE_BYTES);
  }
}

/* shares of two keys, rounded as in narrow_line, interleaved row by row */
INLINE void pair_shares(uint16_t *to, floats one, floats two) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)two, (__m512)one); /* all of `one`, then all of `two` */
  static const uint16_t offsets[PAIRED] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                          8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_loadu_si512(offsets), both));
#else
  uint16_t left[LANES], right[LANES];
  store_as(left, one, BFLOAT16), store_as(right, two, BFLOAT16);
  for (int r = 0; r < LANES; r++) to[2 * r] = left[r], to[2 * r + 1] = right[r];
#endif
}

/* The shares of two neighbouring keys of every LANES, from `t` on, and their sums: a row's shares are added in the
 * order of `exponentiate`, where the two keys would be in two lanes. */
INLINE void share_keys(const float *scores, long t, floats base, uint16_t *shares, floats *totals) {
  totals[0] = totals[1] = all(0);
#pragma GCC unroll 4
  for (; t < TILE; t += TOGETHER * LANES) {
    floats x[2][TOGETHER];
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
#pragma GCC unroll 4
      for (int n = 0; n < TOGETHER; n++) x[k][n] = load(scores + (t + n * LANES + k) * GROUP) - base;
      exponentials(x[k]);
#pragma GCC unroll 4
      for (int n = 0; n < TOGETHER; n++) totals[k] += x[k][n];
    }
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; n++) pair_shares(shares + (t + n * LANES) * GROUP, x[0][n], x[1][n]);
  }
}

/* the softmax of a group of rows, as in softmax_rows */
static void softmax_group(const float *scores, float *top, float *mass, float *rescale, uint16_t *shares) {
  for (int v = 0; v < GROUP; v += LANES) {
    floats before = load(top + v), best[TOGETHER], totals[LANES];
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; n++) best[n] = before;
    for (long t = 0; t < TILE; t += TOGETHER)
#pragma GCC unroll 4
      for (int n = 0; n < TOGETHER; n++) best[n] = larger(load(scores + (t + n) * GROUP + v), best[n]);
#pragma GCC unroll 4
    for (int n = 1; n < TOGETHER; n++) best[0] = larger(best[n], best[0]);
    floats base = choose(best[0] == all(-INFINITY), all(0), best[0]), scale = exponential(before - base);
#pragma GCC unroll 1
    for (int i = 0; i < LANES; i += 2) share_keys(scores + v, i, base, shares + 2 * v, totals + i);
    store(top + v, best[0]), store(rescale + v, scale);
    store(mass + v, fused(load(mass + v), scale, sum_across(totals)));
  }
}

/* 32 values by a part's shares, from value `i` on: for each of its groups [32, rows] */
INLINE void mix_values(const Tile *tile, const char *values, long dim, long i, const Part *part, float *product) {
  tile_zero(0);
  tile_zero(1);
  tile_zero(6);
  tile_zero(7);
  for (long t = tile->first / PAIRED * PAIRED; t < tile->last; t += PAIRED) {
    const char *here = values + t * dim * 2 + i / GROUP * TILE_SIZE;
    tile_load(2, here, TILE_BYTES);
    tile_load(3, part->shares[0] + t * GROUP, TILE_BYTES);
    tile_add_bfloat16(0, 2, 3);
    tile_load(5, here + TILE_SIZE, TILE_BYTES);
    tile_add_bfloat16(1, 5, 3);
    tile_load(4, part->shares[1] + t * GROUP, TILE_BYTES);
    tile_add_bfloat16(6, 2, 4);
    tile_add_bfloat16(7, 5, 4);
  }
  tile_store(0, product, TILE_BYTES);
  tile_store(1, product + GROUP * GROUP, TILE_BYTES);
  tile_store(6, product + 2 * GROUP * GROUP, TILE_BYTES);
  tile_store(7, product + 3 * GROUP * GROUP, TILE_BYTES);
}

/* adds the product of 32 values to the rescaled sums of a group: [32, rows] */
INLINE void add_values(float *mixed, const float *rescale, const float *product) {
  for (int v = 0; v < GROUP; v += LANES) {
    floats scale = load(rescale + v);
#pragma GCC unroll 4
    for (long n = v; n < PAIRED * GROUP; n += GROUP) store(mixed + n, fused(load(mixed + n), scale, load(product + n)));
  }
}

/* mixed: for each group [dim, rows]. Products are added while the next ones are computed. */
INLINE void mix_part(const Tile *tile, const char *values, long dim, const Part *part, float *mixed) {
  float products[2][2 * PAIRED * GROUP] IN_LINES;
  for (long i = 0; i <= dim; i += PAIRED) {
    if (i < dim) mix_values(tile, values, dim, i, part, products[i / PAIRED % 2]);
    if (i == 0) continue;
    for (int g = 0; g < 2; g++)
      add_values(mixed + (g * dim + i - PAIRED) * GROUP, part->rescale[g],
                 products[(i / PAIRED + 1) % 2] + g * PAIRED * GROUP);
  }
}

/* as attend_piece, for many rows of one KV head; q: groups of 16 rows, transposed, padded to a whole part */
static void attend_many(const Attention *a, const Block *b, const char *q, long rows, long piece, Seen *seen) {
  long dim = a->dim, filled = (rows + PART - 1) / PART * PART;
  char keys[TILE * MOST_DIM * 2] IN_LINES, values[TILE * MOST_DIM * 2] IN_LINES;
  float mixed[MANY_ROWS * MOST_DIM] IN_LINES;
  Part part = {0}; /* if the last part has one group, the other is computed too and ignored */
  Tile tile;
  long end = first_tile(a, b, piece, &tile);
  memset(mixed, 0, sizeof(float) * filled * dim);
  for (long r = rows; r < filled; r++) seen->top[r] = -INFINITY, seen->mass[r] = 0; /* padding */
  for (int more = 1; more;) {
    gather_keys(a, &tile, keys);
    transpose_values(a, &tile, values);
    for (long row = 0; row < rows; row += PART) {
      long last = rows - row < PART ? rows - 1 : row + PART - 1;
      if (tile.from > first_position(a, b) + last / b->count) continue; /* the part sees nothing of the tile */
      score_part(&tile, keys, q + row * dim * 2, dim, &part);
      for (long g = 0, r = row; r <= last; g++, r += GROUP) {
        mask_group(a, b, &tile, r, last < r + GROUP ? last : r + GROUP - 1, 0, TILE, part.scores[g]);
        softmax_group(part.scores[g], seen->top + r, seen->mass + r, part.rescale[g], part.shares[g]);
      }
      mix_part(&tile, values, dim, &part, mixed + row * dim);
    }
    more = tile.from + TILE < end;
    if (more) find_tile(a, b, tile.from + TILE, end, &tile);
  }
  transpose_mixed(seen->mixed, mixed, rows, dim);
}
#endif
