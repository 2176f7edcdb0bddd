/* Attention in tiles of 16 by 16, for KV in bfloat16 and head sizes that are multiples of 32. A part of native.c.
 *
 *     few rows (a decode):    scores' = K q'    16 keys, as they lie in the cache, by up to 16 rows of queries, turned once
 *     many rows (a prompt):   scores  = q K'    32 rows of queries by 32 keys, which are turned once for all rows
 *     both:                   mixed   = shares V    rows of shares in bfloat16 by V, whose rows are laid in pairs on the way
 *
 * A query's result is the same in any company: the products of a score are the same in the same order both ways, tiles of tokens
 * are counted from the sequence's beginning, and what a query does not see counts 0. Keys past the sequence's end may be
 * read, inside its own last block; their scores are dropped. */

#if HAS_TILES

static int in_tiles(const Attention *a) { return a->type == BFLOAT16 && a->dim % 32 == 0; }

enum { GROUP = 16, PAIRED = 32 }; /* PAIRED: values of 64 bytes */

/* Few rows: tiles 0, 1 scores; 2, 5 keys, then values; 3 queries; 4 shares; 6, 7 mixed. Many: all are whole. */
static void shape_attention(long rows) {
  TileShape shape = {.palette = 1};
  int few = rows < GROUP ? (int)rows : GROUP;
  const int counts[8] = {GROUP, GROUP, GROUP, GROUP, few, GROUP, few, few};
  const int widths[8] = {few, few, GROUP, few, GROUP, GROUP, GROUP, GROUP};
  for (int n = 0; n < 8; n++) shape.rows[n] = (uint8_t)counts[n], shape.bytes[n] = (uint16_t)(widths[n] * 4);
  tiles_begin(&shape);
}

/* Up to 16 rows of queries of each KV head, rounded: for each 32 values, 16 pairs by the rows. */
static void turn_queries(char *to, const float *q, long rows, long dim, long kv_heads) {
  long each = rows / kv_heads;
  uint32_t lines[TILE_SIZE / 4];
  for (long first = 0; first < rows; first += each)
    for (long at_dim = 0; at_dim < dim; at_dim += PAIRED, to += each * 64) {
      for (long r = 0; r < each; r++) narrow_line((uint16_t *)(lines + r * 16), q + (first + r) * dim + at_dim);
      turn_words((uint32_t *)to, lines, each, 16);
    }
}

/* What the next tile needs, keys and values, asked for evenly while this one is worked on: SOME lines of each at every step
 * of the products, a few beside every pair of values: a third of a tile with the scores, with the pairs, with the mixing. */
enum { SOME = 11 };

typedef struct {
  Ahead keys, values;
} Coming;

INLINE void ask(Coming *coming, long lines) {
  fetch(&coming->keys, lines);
  fetch(&coming->values, lines);
}

static Coming coming_of(const Attention *a, const Block *b, const Tile *tile) {
  if (!b || b->queries > 1) return (Coming){{0}, {0}}; /* a prompt's are used again and again, and lie near */
  return (Coming){ahead_of(a, b, a->keys, tile), ahead_of(a, b, a->values, tile)};
}

/* 16 keys from `here` on in the tile: in the cache, or copied where its blocks do not hold 16 in a row */
static const char *keys_of(const Attention *a, const Tile *tile, long head, long here, char *room, long *stride) {
  long line = a->dim * 2, known = tile->first > here ? tile->first : here;
  const uint16_t *keys = (const uint16_t *)a->keys + head * a->dim;
  *stride = a->kv_heads * line;
  if (a->block_size % GROUP == 0) return (const char *)(keys + tile->places[known] - (known - here) * a->kv_heads * a->dim);
  *stride = line;
  memset(room, 0, GROUP * line);
  for (long t = known; t < here + GROUP && t < tile->last; t++)
    memcpy(room + (t - here) * line, keys + tile->places[t], line);
  return room;
}

/* scores of one or two groups of 16 keys and up to 16 rows: [keys, rows], one group behind the other */
INLINE void score_group(const char *const *keys, const long *stride, const char *q, long rows, long dim, int both,
                        Coming *coming, float *found) {
  long width = rows * 4;
  tile_zero(0);
  if (both) tile_zero(1);
  for (long n = 0; n < dim / PAIRED; n++) {
    ask(coming, SOME);
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
static void turn_scores(float *scores, const float *found, long rows) {
  if (rows == GROUP) {
    turn16_to((uint32_t *)scores, TILE, (const char *)found, TILE_BYTES);
    return;
  }
#if defined(__AVX512F__)
  __m512i keys = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i places = _mm512_mullo_epi32(keys, _mm512_set1_epi32((int)rows));
  for (long r = 0; r < rows; r++, places = _mm512_add_epi32(places, _mm512_set1_epi32(1))) {
    __m512i line = _mm512_srli_epi32(places, 4);
    __m512 row = _mm512_permutexvar_ps(places, _mm512_loadu_ps(found));
    for (int n = 1; n < rows; n++)
      row = _mm512_mask_permutexvar_ps(row, _mm512_cmpeq_epi32_mask(line, _mm512_set1_epi32(n)), places,
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
  char room[2][GROUP * MOST_DIM * 2];
  for (long here = tile->first / GROUP * GROUP; here < tile->last;) {
    const char *keys[2];
    long stride[2];
    int both = here + GROUP < tile->last;
    for (int n = 0; n <= both; n++) keys[n] = keys_of(a, tile, head, here + n * GROUP, room[n], stride + n);
    score_group(keys, stride, q, rows, a->dim, both, coming, found + here * rows);
    here += (1 + both) * GROUP;
  }
}

/* two rows of n values, value by value beside each other, 16 pairs to a row of a tile */
INLINE void pair_values(char *to, const uint16_t *one, const uint16_t *two, long n) {
#if defined(__AVX512BW__)
  static const uint16_t places[2][PAIRED] = {
      {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61,
       30, 62, 31, 63}};
  __m512i low = _mm512_loadu_si512(places[0]), high = _mm512_loadu_si512(places[1]);
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
  long first = tile->first, last = tile->last, few = (a->dim + 47) / 48; /* a third of the lines of a head */
  const uint16_t *values = (const uint16_t *)a->values + head * a->dim;
  static const uint16_t zeros[MOST_DIM];
  for (long t = first / PAIRED * PAIRED; t < (last + PAIRED - 1) / PAIRED * PAIRED; t += 2) {
    const uint16_t *line[2];
    for (long n = 0; n < 2; n++)
      line[n] = t + n >= first && t + n < last ? values + tile->places[t + n] : zeros;
    if (coming) ask(coming, few);
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
      ask(coming, SOME);
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

/* what was seen before, and the products of a tile; from row `first` on */
INLINE void add_tile(Seen *seen, long first, long rows, const float *rescale, const float *product, long dim) {
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < dim; i += LANES) {
      float *to = seen->mixed + (first + r) * dim + i;
      store(to, fused(load(to), all(rescale[r]), load(product + r * dim + i)));
    }
}

/* as attend_piece, where each KV head has at most 16 rows */
static void attend_few(const Attention *a, const Block *b, const char *q, long rows, long piece, const Block *next,
                       Seen *seen) {
  long dim = a->dim, each = rows / b->kv_heads;
  float found[MOST_ROWS * TILE], scores[MOST_ROWS * TILE], rescale[MOST_ROWS] = {0}, product[MOST_ROWS * MOST_DIM];
  uint16_t share[MOST_ROWS * TILE];
  char values[TILE * MOST_DIM * 2];
  Tile tiles[2];
  long end = first_tile(a, b, piece, tiles);
  for (int turn = 0, more = 1; more; turn = !turn) {
    const Tile *tile = tiles + turn;
    more = tile->from + TILE < end;
    const Block *after = next_tile(a, b, tile, end, next, tiles + !turn);
    Coming coming = coming_of(a, after, tiles + !turn);
    for (long h = 0; h < b->kv_heads; h++)
      score_tile(a, tile, h, q + h * each * dim * 2, each, &coming, found + h * each * TILE);
    for (long h = 0; h < b->kv_heads; h++)
      for (long here = tile->first / GROUP * GROUP; here < tile->last; here += GROUP)
        turn_scores(scores + h * each * TILE + here, found + (h * TILE + here) * each, each);
    share_rows(a, b, 0, rows, tile->from, scores, seen, rescale);
    for (long t = 0; t < rows * TILE; t += PAIRED) narrow_line(share + t, scores + t);
    for (long h = 0; h < b->kv_heads; h++) {
      pair_tile(a, tile, h, &coming, values);
      mix_tile(product + h * each * dim, share + h * each * TILE, values, dim, tile, &coming);
    }
    add_tile(seen, 0, rows, rescale, product, dim);
  }
}

/* ---- many rows: parts of 32 of them, for which a tile's keys are turned and its values paired once */

enum { PART = 2 * GROUP };

/* the keys of a tile: for each 16 of them and each 32 values, 16 pairs by 16 keys */
static void turn_keys(const Attention *a, const Tile *tile, char *to) {
  char room[GROUP * MOST_DIM * 2];
  for (long here = tile->first / GROUP * GROUP; here < tile->last; here += GROUP) {
    long stride;
    const char *keys = keys_of(a, tile, 0, here, room, &stride);
    for (long n = 0; n < a->dim / PAIRED; n++)
      turn16((uint32_t *)(to + here * a->dim * 2 + n * TILE_SIZE), keys + n * TILE_BYTES, stride);
  }
}

/* a part's scores, for two groups of keys at once; those outside first..last are nonsense */
INLINE void score_part(const Tile *tile, const char *q, const char *keys, long dim, float *scores) {
  for (long here = tile->first / PAIRED * PAIRED; here < tile->last; here += PAIRED) {
    const char *one = keys + here * dim * 2, *two = one + GROUP * dim * 2;
    tile_zero(0);
    tile_zero(1);
    tile_zero(6);
    tile_zero(7);
    for (long n = 0; n < dim / PAIRED; n++) {
      tile_load(3, q + n * TILE_BYTES, dim * 2);
      tile_load(2, one + n * TILE_SIZE, TILE_BYTES);
      tile_add_bfloat16(0, 3, 2);
      tile_load(5, two + n * TILE_SIZE, TILE_BYTES);
      tile_add_bfloat16(1, 3, 5);
      tile_load(4, q + GROUP * dim * 2 + n * TILE_BYTES, dim * 2);
      tile_add_bfloat16(6, 4, 2);
      tile_add_bfloat16(7, 4, 5);
    }
    tile_store(0, scores + here, TILE * 4);
    tile_store(1, scores + here + GROUP, TILE * 4);
    tile_store(6, scores + GROUP * TILE + here, TILE * 4);
    tile_store(7, scores + GROUP * TILE + here + GROUP, TILE * 4);
  }
}

/* a part's shares times values: [32, dim] */
INLINE void mix_part(float *product, const uint16_t *share, const char *values, long dim, const Tile *tile) {
  for (long i = 0; i < dim; i += 2 * GROUP) {
    tile_zero(0);
    tile_zero(1);
    tile_zero(6);
    tile_zero(7);
    for (long t = tile->first / PAIRED * PAIRED; t < tile->last; t += PAIRED) {
      const char *here = values + t / PAIRED * dim * 64 + i / GROUP * TILE_SIZE;
      tile_load(4, share + t, TILE * 2);
      tile_load(5, here, TILE_BYTES);
      tile_add_bfloat16(0, 4, 5);
      tile_load(2, here + TILE_SIZE, TILE_BYTES);
      tile_add_bfloat16(1, 4, 2);
      tile_load(3, share + GROUP * TILE + t, TILE * 2);
      tile_add_bfloat16(6, 3, 5);
      tile_add_bfloat16(7, 3, 2);
    }
    tile_store(0, product + i, dim * 4);
    tile_store(1, product + i + GROUP, dim * 4);
    tile_store(6, product + GROUP * dim + i, dim * 4);
    tile_store(7, product + GROUP * dim + i + GROUP, dim * 4);
  }
}

/* as attend_piece, for many rows of one KV head; q: the rows rounded, as they are, filled up to a whole part */
static void attend_many(const Attention *a, const Block *b, const uint16_t *q, long rows, long piece, Seen *seen) {
  long dim = a->dim;
  float scores[PART * TILE], rescale[PART] = {0}, product[PART * MOST_DIM];
  uint16_t share[PART * TILE] = {0};
  char keys[TILE * MOST_DIM * 2] = {0}, values[TILE * MOST_DIM * 2];
  Tile tile;
  long end = first_tile(a, b, piece, &tile);
  for (int more = 1; more;) {
    turn_keys(a, &tile, keys);
    pair_tile(a, &tile, 0, NULL, values);
    for (long part = 0; part < rows; part += PART) {
      long these = rows - part < PART ? rows - part : PART;
      if (tile.from > first_position(a, b) + (part + these - 1) / b->count) continue; /* none of it can be seen */
      score_part(&tile, (const char *)(q + part * dim), keys, dim, scores);
      share_rows(a, b, part, these, tile.from, scores, seen, rescale);
      for (long t = 0; t < these * TILE; t += PAIRED) narrow_line(share + t, scores + t);
      mix_part(product, share, values, dim, &tile);
      add_tile(seen, part, these, rescale, product, dim);
    }
    more = tile.from + TILE < end;
    if (more) find_tile(a, b, tile.from + TILE, end, &tile);
  }
}
#endif
