/* Attention of many rows with vector instructions (AVX-512, AVX2), for head sizes that are multiples of 16. Part of
 * native.c.
 *
 * Rows are the queries of a sequence times the query heads of a KV head; here 16 of them, a group, are in the lanes of
 * one vector, or of several, from the scores to the end: keys and values are broadcast from where they are, and no row
 * needs a sum or a maximum across lanes.
 *
 *     queries  [groups, dim, 16]     transposed once for all keys
 *     scores   [groups, keys, 16]    become shares in place
 *     mixed    [groups, dim, 16]     transposed back at the end of a piece
 *
 * A band is a few vectors of rows, whose sums stay in registers.
 *
 * To the last bit the results are those of attention.c, where the lanes of a vector belong to one row: a score is
 * summed as LANES chains that are then added as `sum` adds lanes, shares are added in the order of `exponentiate`, and
 * values token by token. So a query's result is the same in a prompt, beside a few others and alone. */

#define IN_LINES __attribute__((aligned(64))) /* a vector or a row of a tile that spans two cache lines is read twice */

#if HAS_LANES

enum { GROUP = 16 };

/* Scores of keys `begin` to `end` - 1 of a tile that the rows of a group, row..last_row, may not see become -infinity,
 * as in `mask`. */
static void mask_group(const Attention *a, const Block *b, const Tile *tile, long row, long last_row, long begin,
                       long end, float *scores) {
  long position = first_position(a, b) - tile->from, window = a->window;
  int32_t firsts[GROUP], lasts[GROUP]; /* each row sees first..last of this tile */
  if (position + row / b->count >= end - 1 && (!window || position + last_row / b->count < window + begin))
    return;
  for (long r = 0; r < GROUP; r++) {
    long last = position + (row + r) / b->count, first = window ? last - window + 1 : 0;
    lasts[r] = (int32_t)(last < -1 ? -1 : last < tile->last ? last : tile->last - 1);
    firsts[r] = (int32_t)(first < 0 ? 0 : first < TILE ? first : TILE);
  }
  for (int v = 0; v < GROUP; v += LANES) {
    ints first, last;
    memcpy(&first, firsts + v, sizeof first), memcpy(&last, lasts + v, sizeof last);
    for (int32_t t = (int32_t)begin; t < (int32_t)end; t++) {
      float *here = scores + t * GROUP + v;
#if defined(__AVX512F__)
      __m512i key = _mm512_set1_epi32(t);
      __mmask16 seen = _mm512_mask_cmple_epi32_mask(_mm512_cmple_epi32_mask((__m512i)first, key), key, (__m512i)last);
      store(here, (floats)_mm512_mask_mov_ps((__m512)all(-INFINITY), seen, (__m512)load(here)));
#else
      store(here, choose((first <= t) & (last >= t), load(here), all(-INFINITY)));
#endif
    }
  }
}

/* `sum` of LANES vectors at once: lane r gets the sum of row r, added in the same order */
INLINE floats sum_across(floats *x) {
#pragma GCC unroll 2
  for (int width = LANES / 2; width >= 4; width /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < width; i++) x[i] += x[i + width];
  return (x[0] + x[1]) + (x[2] + x[3]);
}

/* for each group [dim, rows] to [rows, dim] */
static void transpose_mixed(float *to, const float *mixed, long rows, long dim) {
  float scratch[GROUP * MOST_DIM];
  for (long row = 0; row < rows; row += GROUP) {
    int whole = row + GROUP <= rows;
    float *here = whole ? to + row * dim : scratch;
    for (long i = 0; i < dim; i += GROUP)
      transpose16_to((uint32_t *)(here + i), dim, (const char *)(mixed + row * dim + i * GROUP), GROUP * 4);
    if (!whole) memcpy(to + row * dim, scratch, sizeof(float) * (rows - row) * dim);
  }
}

/* vectors of rows in a band, whole groups; keys that are scored and values that are mixed at once */
#if defined(__AVX512F__)
enum { BAND = 2, BAND_KEYS = 4, BAND_VALUES = 8 };
#else
enum { BAND = GROUP / LANES, BAND_KEYS = 4, BAND_VALUES = 4 };
#endif
enum { BAND_ROWS = BAND * LANES, FEW_ROWS = 8 }; /* below FEW_ROWS, most lanes would be empty */

/* whether a block of that many rows is computed here */
static int in_bands(const Attention *a, const Block *b, long rows) {
  return a->dim % GROUP == 0 && b->queries > 1 && rows >= FEW_ROWS && !in_tiles(a);
}

/* where vector v of a band begins, if a group has `lines` lines of 16 rows */
INLINE long vector_at(int v, long lines) { return v * LANES / GROUP * lines * GROUP + v * LANES % GROUP; }

/* the products of value k of BAND_KEYS keys and some vectors of rows: a chain's first ones, or added to its sums */
INLINE void score_step(floats sums[BAND_KEYS][BAND], const float *q, const float *const *keys, long dim, long k,
                       int vectors, int first) {
  floats left[BAND];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) left[v] = load(q + k * GROUP + vector_at(v, dim));
#pragma GCC unroll 8
  for (int j = 0; j < BAND_KEYS; j++) {
    floats one = all(keys[j][k]);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[j][v] = first ? left[v] * one : fused(left[v], one, sums[j][v]);
  }
}

/* one of the LANES chains of scores: the values whose index, divided by LANES, leaves `lane` */
INLINE void score_chain(floats sums[BAND_KEYS][BAND], const float *q, const float *const *keys, long dim, long lane,
                        int vectors) {
  score_step(sums, q, keys, dim, lane, vectors, 1);
#pragma GCC unroll 3
  for (long k = lane + LANES; k < dim; k += LANES) score_step(sums, q, keys, dim, k, vectors, 0);
}

INLINE void add_chains(floats sums[BAND_KEYS][BAND], floats more[BAND_KEYS][BAND], int vectors) {
#pragma GCC unroll 8
  for (int j = 0; j < BAND_KEYS; j++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[j][v] += more[j][v];
}

/* scores of BAND_KEYS keys: the chains are added in the order of `sum` */
INLINE void score_keys(const float *q, const float *const *keys, long dim, int vectors, float *scores) {
  floats quarters[4][BAND_KEYS][BAND];
#pragma GCC unroll 1
  for (long i = 0; i < 4; i++) {
    floats sums[BAND_KEYS][BAND], more[BAND_KEYS][BAND], last[BAND_KEYS][BAND];
    score_chain(sums, q, keys, dim, i, vectors);
    if (LANES > 4) {
      score_chain(more, q, keys, dim, i + LANES / 2, vectors);
      add_chains(sums, more, vectors);
    }
    if (LANES > 8) {
      score_chain(more, q, keys, dim, i + 4, vectors);
      score_chain(last, q, keys, dim, i + 12, vectors);
      add_chains(more, last, vectors);
      add_chains(sums, more, vectors);
    }
#pragma GCC unroll 8
    for (int j = 0; j < BAND_KEYS; j++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) quarters[i][j][v] = sums[j][v];
  }
#pragma GCC unroll 8
  for (int j = 0; j < BAND_KEYS; j++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      store(scores + j * GROUP + vector_at(v, TILE),
            (quarters[0][j][v] + quarters[1][j][v]) + (quarters[2][j][v] + quarters[3][j][v]));
}

/* what is prefetched meanwhile, and how many lines at every step */
typedef struct {
  Prefetch what;
  long pace;
} Meanwhile;

/* scores of keys `first` to `last` - 1, which are whole BAND_KEYS */
INLINE void score_band(const float *q, Tokens keys, Meanwhile *ahead, long first, long last, long dim, float *scores,
                       int vectors) {
  for (long t = first; t < last; t += BAND_KEYS) {
    const float *lines[BAND_KEYS];
    prefetch_lines(&ahead->what, ahead->pace);
#pragma GCC unroll 8
    for (int j = 0; j < BAND_KEYS; j++) lines[j] = token(keys, t + j, FLOAT32);
    score_keys(q, lines, dim, vectors, scores + t * GROUP);
  }
}

/* the softmax of LANES rows, as in softmax_rows; keys before `first` and from `last` on count nothing */
INLINE void softmax_lanes(float *scores, long first, long last, float *top, float *mass, float *rescale) {
  floats before = load(top), best[TOGETHER], totals[LANES];
#pragma GCC unroll 4
  for (int n = 0; n < TOGETHER; n++) best[n] = before;
  for (long t = first; t < last; t += TOGETHER)
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; n++) best[n] = larger(load(scores + (t + n) * GROUP), best[n]);
#pragma GCC unroll 4
  for (int n = 1; n < TOGETHER; n++) best[0] = larger(best[n], best[0]);
  floats base = choose(best[0] == all(-INFINITY), all(0), best[0]), scale = exponential(before - base);
  for (long i = 0; i < LANES; i += TOGETHER) {
    floats sums[TOGETHER];
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; n++) sums[n] = all(0);
    for (long t = first / LANES * LANES + i; t < last; t += LANES) {
      if (t < first) continue;
      floats x[TOGETHER];
#pragma GCC unroll 4
      for (int n = 0; n < TOGETHER; n++) x[n] = load(scores + (t + n) * GROUP) - base;
      exponentials(x);
#pragma GCC unroll 4
      for (int n = 0; n < TOGETHER; n++) store(scores + (t + n) * GROUP, x[n]), sums[n] += x[n];
    }
#pragma GCC unroll 4
    for (int n = 0; n < TOGETHER; n++) totals[i + n] = sums[n];
  }
  store(top, best[0]), store(rescale, scale);
  store(mass, fused(load(mass), scale, sum_across(totals)));
}

/* adds the values of tokens `first` to `last` - 1, times their shares, to the rescaled sums */
INLINE void mix_band(float *mixed, const float *shares, const float *rescale, Tokens values, Meanwhile *ahead,
                     long first, long last, long dim, int vectors) {
  for (long i = 0; i < dim; i += BAND_VALUES) {
    prefetch_lines(&ahead->what, ahead->pace);
    floats sums[BAND_VALUES][BAND];
#pragma GCC unroll 8
    for (int n = 0; n < BAND_VALUES; n++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++)
        sums[n][v] = load(mixed + (i + n) * GROUP + vector_at(v, dim)) * load(rescale + v * LANES);
    for (long t = first; t < last; t++) {
      const float *line = (const float *)token(values, t, FLOAT32) + i;
      floats share[BAND];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) share[v] = load(shares + t * GROUP + vector_at(v, TILE));
#pragma GCC unroll 8
      for (int n = 0; n < BAND_VALUES; n++) {
        floats one = all(line[n]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[n][v] = fused(share[v], one, sums[n][v]);
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < BAND_VALUES; n++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) store(mixed + (i + n) * GROUP + vector_at(v, dim), sums[n][v]);
  }
}

/* a band of a block: rows `row` to `last_row`, which see keys first..last - 1 of the tile */
typedef struct {
  long row, last_row, first, last;
} Band;

static Band band_of(const Attention *a, const Block *b, const Tile *tile, long rows, long row) {
  Band band = {row, rows - row < BAND_ROWS ? rows - 1 : row + BAND_ROWS - 1, tile->first, tile->last};
  long position = first_position(a, b) - tile->from, newest = position + band.last_row / b->count;
  long oldest = a->window ? position + row / b->count - a->window + 1 : 0;
  if (newest + 1 < band.last) band.last = newest + 1;
  if (oldest > band.first) band.first = oldest;
  return band;
}

/* a band of a block's last rows may have one vector only */
static int vectors_of(const Band *band) { return band->last_row - band->row < LANES ? 1 : BAND; }

static void score_and_share(const Attention *a, const Block *b, const Tile *tile, const Band *band, const float *q,
                            Tokens keys, Meanwhile *ahead, float *scores, Seen *seen, float *rescale) {
  long first = band->first / BAND_KEYS * BAND_KEYS, last = (band->last + BAND_KEYS - 1) / BAND_KEYS * BAND_KEYS;
  if (vectors_of(band) == 1)
    score_band(q, keys, ahead, first, last, a->dim, scores, 1);
  else if (a->dim == 64) /* chains of known length */
    score_band(q, keys, ahead, first, last, 64, scores, BAND);
  else
    score_band(q, keys, ahead, first, last, a->dim, scores, BAND);
  for (long row = band->row; row <= band->last_row; row += GROUP) {
    float *here = scores + (row - band->row) * TILE;
    long most = row + GROUP - 1 < band->last_row ? row + GROUP - 1 : band->last_row;
    mask_group(a, b, tile, row, most, first, last, here);
    for (long r = row; r <= most; r += LANES)
      softmax_lanes(here + (r - row), first, last, seen->top + r, seen->mass + r, rescale + r);
  }
}

/* to prefetch a tile's keys or values within so many steps; b: the block that it belongs to, or NULL */
static Meanwhile prefetch_in(const Attention *a, const Block *b, const void *cache, const Tile *tile, long steps) {
  Meanwhile ahead = {{0}, (TILE * lines_of(a->dim, a->type) + steps - 1) / steps};
  if (b) ahead.what = prefetch_of(a, b, cache, tile);
  return ahead;
}

/* as attend_piece, for many rows of one KV head */
static void attend_bands(const Attention *a, const Block *b, const float *q, long rows, long piece, const Block *next,
                         Seen *seen) {
  long dim = a->dim, filled = (rows + GROUP - 1) / GROUP * GROUP, bands = (rows + BAND_ROWS - 1) / BAND_ROWS;
  float mixed[MANY_ROWS * MOST_DIM] IN_LINES, scores[MANY_ROWS * TILE] IN_LINES, rescale[MANY_ROWS] IN_LINES;
  Copy scratch, *copy = is_copied(a, rows) ? &scratch : NULL;
  Tile tiles[2];
  long end = first_tile(a, b, piece, tiles);
  memset(mixed, 0, sizeof(float) * filled * dim);
  for (long r = rows; r < filled; r++) seen->top[r] = -INFINITY, seen->mass[r] = 0; /* padding */
  for (int current = 0, more = 1; more; current = !current) {
    const Tile *tile = tiles + current;
    Tokens keys = tokens_of(a, tile, a->keys, 0, copy);
    Meanwhile ahead = prefetch_in(a, b, a->values, tile, bands * (TILE / BAND_KEYS));
    for (long row = 0; row < rows; row += BAND_ROWS) {
      Band band = band_of(a, b, tile, rows, row);
      if (band.first < band.last)
        score_and_share(a, b, tile, &band, q + row * dim, keys, &ahead, scores + row * TILE, seen, rescale);
    }
    more = tile->from + TILE < end;
    const Block *after = next_tile(a, b, tile, end, next, tiles + !current);
    Tokens values = tokens_of(a, tile, a->values, 0, copy);
    ahead = prefetch_in(a, after, a->keys, tiles + !current, bands * (dim / BAND_VALUES));
    for (long row = 0; row < rows; row += BAND_ROWS) {
      Band band = band_of(a, b, tile, rows, row);
      float *to = mixed + row * dim, *shares = scores + row * TILE;
      if (band.first >= band.last) continue;
      if (vectors_of(&band) == 1)
        mix_band(to, shares, rescale + row, values, &ahead, band.first, band.last, dim, 1);
      else
        mix_band(to, shares, rescale + row, values, &ahead, band.first, band.last, dim, BAND);
    }
  }
  transpose_mixed(seen->mixed, mixed, rows, dim);
}
#endif
