/* Attention in tiles of 16 by 16, for KV in bfloat16 and head sizes that are multiples of 32. A part of native.c.
 *
 *     scores' = K q'      16 keys, as they lie in the cache, by up to 16 rows of queries, turned once
 *     mixed   = shares V  up to 16 rows of shares in bfloat16 by V, whose rows are laid in pairs on the way
 *
 * A query's result is the same in any company: tiles of tokens are counted from the sequence's beginning, and what a query
 * does not see counts 0. Keys past the sequence's end may be read, inside its own last block; their scores are dropped. */

#if HAS_TILES

static int in_tiles(const Attention *a) { return a->type == BFLOAT16 && a->dim % 32 == 0; }

enum { GROUP = 16, GROUPS = TILE / GROUP, PAIRED = 32 }; /* PAIRED: values of 64 bytes */

/* the tiles of a block: 0, 1 scores; 2 keys; 3 queries; 4 shares; 5 values; 6, 7 mixed. Above 16 rows all are whole. */
static void shape_attention(long rows) {
  TileShape shape = {.palette = 1};
  int few = rows < GROUP ? (int)rows : GROUP;
  const int counts[8] = {GROUP, GROUP, GROUP, GROUP, few, GROUP, few, few};
  const int widths[8] = {few, few, GROUP, few, GROUP, GROUP, GROUP, GROUP};
  for (int n = 0; n < 8; n++) shape.rows[n] = (uint8_t)counts[n], shape.bytes[n] = (uint16_t)(widths[n] * 4);
  tiles_begin(&shape);
}

/* rows of queries, rounded: for each 16 of them and each 32 values, 16 pairs by the rows */
static void turn_queries(char *to, const float *q, long rows, long dim) {
  for (long first = 0; first < rows; first += GROUP) {
    long these = rows < GROUP ? rows : GROUP;
    for (long at_dim = 0; at_dim < dim; at_dim += PAIRED, to += these * 64) {
      uint32_t lines[TILE_SIZE / 4] = {0};
      for (long r = 0; r < these && first + r < rows; r++)
        for (long i = 0; i < PAIRED; i += LANES)
          store_as((uint16_t *)(lines + r * 16) + i, load(q + (first + r) * dim + at_dim + i), BFLOAT16);
      turn_words((uint32_t *)to, lines, these, 16);
    }
  }
}

static const char *place_in_memory(const Attention *a, const Block *b, const void *cache, long token) {
  long block = a->tables[b->sequence * a->table_width + token / a->block_size];
  long slot = block * a->block_size + token % a->block_size;
  return (const char *)cache + (slot * a->kv_heads + b->kv_head) * a->dim * 2;
}

/* 16 keys: in the cache, or copied where its blocks do not hold 16 in a row; first and last as in the group */
static const char *keys_of(const Attention *a, const Block *b, long from, long first, long last, char *room,
                           long *stride) {
  long line = a->dim * 2;
  *stride = a->kv_heads * line;
  if (a->block_size % GROUP == 0) return place_in_memory(a, b, a->keys, from);
  *stride = line;
  memset(room, 0, GROUP * line);
  for (long t = first > 0 ? first : 0; t < GROUP && t < last; t++)
    memcpy(room + t * line, place_in_memory(a, b, a->keys, from + t), line);
  return room;
}

/* scores of a group of 16 keys (of two, if there are at most 16 rows), into [keys, rows], one set of 16 rows after the
 * other, or one group after the other */
INLINE void score_group(const char *const *keys, const long *stride, const char *q, long rows, long dim, int both,
                        float *found) {
  long width = (rows < GROUP ? rows : GROUP) * 4, many = rows > GROUP, set = dim * GROUP * 2;
  tile_zero(0);
  tile_zero(1);
  for (long n = 0; n < dim / PAIRED; n++) {
    tile_load(3, q + n * width * GROUP, width);
    tile_load(2, keys[0] + n * TILE_BYTES, stride[0]);
    tile_add_bfloat16(0, 2, 3);
    if (many) {
      tile_load(4, q + set + n * width * GROUP, width);
      tile_add_bfloat16(1, 2, 4);
    } else if (both) {
      tile_load(5, keys[1] + n * TILE_BYTES, stride[1]);
      tile_add_bfloat16(1, 5, 3);
    }
  }
  tile_store(0, found, width);
  if (many || both) tile_store(1, found + GROUP * GROUP, width);
}

/* [16 keys, rows] to rows of scores */
static void turn_scores(float *scores, const float *found, long rows) {
  uint32_t turned[TILE_SIZE / 4];
  if (rows == GROUP)
    turn16(turned, (const char *)found, TILE_BYTES);
  else
    turn_words(turned, (const uint32_t *)found, GROUP, rows);
  for (long r = 0; r < rows; r++) memcpy(scores + r * TILE, turned + r * GROUP, sizeof(float) * GROUP);
}

/* all scores of a tile of tokens; those outside first..last are nonsense */
static void score_tile(const Attention *a, const Block *b, const char *q, long rows, long from, long first, long last,
                       float *scores) {
  char room[2][GROUP * MOST_DIM * 2];
  float found[2 * GROUP * GROUP];
  for (long group = first / GROUP; group * GROUP < last;) {
    const char *keys[2];
    long stride[2], here = group * GROUP;
    int both = rows <= GROUP && here + GROUP < last;
    for (int n = 0; n <= both; n++)
      keys[n] = keys_of(a, b, from + here + n * GROUP, first - here - n * GROUP, last - here - n * GROUP, room[n],
                        stride + n);
    score_group(keys, stride, q, rows, a->dim, both, found);
    turn_scores(scores + here, found, rows < GROUP ? rows : GROUP);
    if (both) turn_scores(scores + here + GROUP, found + GROUP * GROUP, rows);
    if (rows > GROUP) turn_scores(scores + GROUP * TILE + here, found + GROUP * GROUP, GROUP);
    group += 1 + both;
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
static void pair_tile(const Attention *a, const long *places, long first, long last, char *to) {
  static const uint16_t zeros[MOST_DIM];
  for (long t = first / PAIRED * PAIRED; t < (last + PAIRED - 1) / PAIRED * PAIRED; t += 2) {
    const uint16_t *line[2];
    for (long n = 0; n < 2; n++)
      line[n] = t + n >= first && t + n < last ? (const uint16_t *)a->values + places[t + n] : zeros;
    pair_values(to + t / PAIRED * a->dim * 64 + t % PAIRED / 2 * 64, line[0], line[1], a->dim);
  }
}

/* mixed [16 or 32 rows, dim] plus shares [the same rows, TILE] times values */
INLINE void mix_tile(float *mixed, const uint16_t *share, const char *values, long rows, long dim, long first,
                     long last) {
  int many = rows > GROUP;
  for (long i = 0; i < dim; i += 2 * GROUP) { /* many rows: two sets of rows; few: two sets of values */
    for (int half = 0; half < 1 + many; half++) {
      float *one = mixed + i + half * GROUP, *two = many ? one + GROUP * dim : one + GROUP;
      tile_load(6, one, dim * 4);
      tile_load(7, two, dim * 4);
      for (long t = first / PAIRED * PAIRED; t < last; t += PAIRED) {
        const char *here = values + t / PAIRED * dim * 64 + (i / GROUP + half) * TILE_SIZE;
        tile_load(4, share + t, TILE * 2);
        tile_load(5, here, TILE_BYTES);
        tile_add_bfloat16(6, 4, 5);
        if (many) {
          tile_load(3, share + GROUP * TILE + t, TILE * 2);
          tile_add_bfloat16(7, 3, 5);
        } else {
          tile_load(2, here + TILE_SIZE, TILE_BYTES);
          tile_add_bfloat16(7, 4, 2);
        }
      }
      tile_store(6, one, dim * 4);
      tile_store(7, two, dim * 4);
    }
  }
}

/* as attend_piece */
static void attend_piece_tiled(const Attention *a, const Block *b, const char *q, long rows, long position, long oldest,
                               long piece, Seen *seen) {
  long newest = position + b->queries - 1, dim = a->dim, all_rows = rows > GROUP ? 2 * GROUP : rows;
  long begin = piece * PIECE, end = begin + PIECE < newest + 1 ? begin + PIECE : newest + 1;
  float scores[MOST_ROWS * TILE], mixed[MOST_ROWS * MOST_DIM];
  uint16_t share[MOST_ROWS * TILE];
  char values[TILE / PAIRED * MOST_DIM * 64];
  for (long r = 0; r < rows; r++) seen->top[r] = -INFINITY, seen->mass[r] = 0;
  memset(mixed, 0, sizeof(float) * all_rows * dim);
  memset(share, 0, sizeof(uint16_t) * all_rows * TILE);
  if (oldest > begin) begin = oldest / TILE * TILE;
  for (long from = begin; from < end; from += TILE) {
    long first = oldest > from ? oldest - from : 0, last = end - from < TILE ? end - from : TILE;
    long places[TILE], soon[TILE], coming = end - from - TILE < TILE ? end - from - TILE : TILE;
    find_tokens(a, b, from, first, last, places);
    fetch_tokens(a, a->values, places, first, last);
    score_tile(a, b, q, rows, from, first, last, scores);
    if (coming > 0) {
      find_tokens(a, b, from + TILE, 0, coming, soon);
      fetch_tokens(a, a->keys, soon, 0, coming);
    }
    for (long r = 0; r < rows; r++) {
      float *line = scores + r * TILE;
      float rescale = shares(line, from, position + r / b->count, a->window, seen->top + r, seen->mass + r);
      for (long t = 0; t < TILE; t += LANES) store_as(share + r * TILE + t, load(line + t), BFLOAT16);
      for (long i = 0; i < dim; i += LANES) store(mixed + r * dim + i, load(mixed + r * dim + i) * all(rescale));
    }
    pair_tile(a, places, first, last, values);
    mix_tile(mixed, share, values, rows, dim, first, last);
  }
  memcpy(seen->mixed, mixed, sizeof(float) * rows * dim);
}
#endif
