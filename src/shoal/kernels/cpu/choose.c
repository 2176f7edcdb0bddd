/* Choosing tokens. Part of native.c.
 *
 * For every line of scores: logit bias, penalties, forbidden end tokens and a grammar's mask; then the likeliest token,
 * or a draw after temperature, top_k, top_p and min_p. The meaning is that of kernels/ref.py, the noise that of
 * kernels/noise.py.
 *
 * The token drawn is the largest of score + noise. Most tokens need no noise: their score is so far below the largest
 * sum found so far that no noise can lift them above it. For the others the noise is computed with logarithms in double
 * precision, rounded to float32 where torch rounds: the same on every machine, and within one unit in the last place of
 * a float32 logarithm. Nothing is sorted: a filter is a least score, found by counting the scores above it in ever
 * finer buckets. */

typedef struct {
  /* one entry per row of the sampler's tables */
  const float *temperature, *top_p, *min_p;
  const int64_t *top_k, *seed, *sample, *first_free_end;
  const int64_t *bias_first, *bias_count, *ends_first, *ends_count; /* ranges of the lists below */
  const int64_t *penalty_slot;                                      /* of seen and counts, or -1 */
  const float *repetition, *frequency, *presence;
  /* shared by all rows */
  const int64_t *bias_ids, *ends_ids;
  const float *bias_amounts;
  /* [slots, vocabulary] */
  uint8_t *seen; /* in the prompt or the output */
  float *counts; /* how often in the output */
} Sampling;

typedef struct {
  const Sampling *state;
  const float *scores;
  const int64_t *rows, *positions; /* of each line of scores */
  const int64_t *mask_of;          /* of each line: index of its mask, or -1; NULL: no masks */
  const uint32_t *masks;           /* a bit for each token that is allowed */
  const int64_t *expected;         /* of each line: the draft token that it verifies, or -1; NULL: no drafts */
  int64_t *tokens;
  float *best;
  long n;
} Choice;

enum { BUCKETS = 2048, STRETCH = 64 };
typedef uint32_t loose_word __attribute__((may_alias));
static const float MOST_NOISE = 16.64f; /* upper bound: -log(-log(1 - 2^-24)) is 16.6355 */

INLINE int any(ints where) {
  uint64_t parts[LANES / 2], found = 0;
  memcpy(parts, &where, sizeof parts);
  for (int i = 0; i < LANES / 2; i++) found |= parts[i];
  return found != 0;
}

/* a + b x c, rounded twice, as torch does */
INLINE float add_rounded(float a, float b, float c) {
  float product = b * c;
  __asm__("" : "+m"(product)); /* keeps the compiler from fusing the two, which would round once */
  return a + product;
}

static uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

static uint64_t draw_key(int64_t seed, int64_t sample, int64_t position) {
  const uint64_t golden = 0x9E3779B97F4A7C15u;
  uint64_t key = mix64((uint64_t)seed + golden) ^ (uint64_t)sample;
  key = mix64(key + golden) ^ (uint64_t)position;
  return mix64(key + golden);
}

INLINE words scramble(words x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

/* 23 random bits for each of LANES ids */
INLINE words random_bits(words ids, uint64_t key) {
  words mixed = scramble(ids * 0x9E3779B1u + (uint32_t)key);
  return scramble(mixed ^ (uint32_t)(key >> 32)) >> 9;
}

static float noise_of(uint32_t bits) {
  float uniform = ((float)bits + 0.5f) * 0x1p-23f;
  float inner = (float)-log((double)uniform);
  return (float)-log((double)inner);
}

/* An upper bound of the noise of these bits, at most 0.07 too large where it matters: -log(u) is at least 1 - u, and
 * the bits of a float, read as an integer, are a lower bound of its logarithm. */
INLINE floats noise_bound(words bits) {
  floats rest = all(8388607.5f) - __builtin_convertvector((ints)bits, floats); /* (1 - u) x 2^23 */
  return all(150.0f * 0.69314718f + 1e-3f) - __builtin_convertvector((ints)rest, floats) * all(0.69314718f * 0x1p-23f);
}

/* the largest score; NaN if any score is NaN */
static float largest_of(const float *x, long n) {
  floats most[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
  ints broken = {0};
  long i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      floats here = load(x + i + j * LANES);
      most[j] = choose(here > most[j], here, most[j]);
      broken |= here != here;
    }
  for (int j = 1; j < 4; j++) most[0] = choose(most[j] > most[0], most[j], most[0]);
  float top = largest(most[0]);
  int bad = any(broken);
  for (; i < n; i++) {
    top = x[i] > top ? x[i] : top;
    bad |= x[i] != x[i];
  }
  return bad ? NAN : top;
}

/* index of the first element equal to value; the last index if there is none */
static long index_of(float value, const float *x, long n) {
  long i = 0;
  for (; i + STRETCH <= n; i += STRETCH) {
    ints found = {0};
#pragma GCC unroll 16
    for (int j = 0; j < STRETCH; j += LANES) found |= load(x + i + j) == all(value);
    if (any(found)) break;
  }
  while (i < n - 1 && x[i] != value) i++;
  return i;
}

typedef struct {
  float top, temperature; /* the best score; both exact, for scaled() */
  float rate;             /* about 1 / temperature, where rounding does not matter */
  float least;            /* the least scaled score that the filters keep */
  uint64_t key;
  float sum; /* score + noise of the token chosen so far */
  long token;
} Draw;

INLINE float scaled(const Draw *d, float x) { return (x - d->top) / d->temperature; }

/* A bound on score - top: scores below it have scaled scores below `least` for any rounding; some above it do too. A
 * division costs as much as ten other steps, so only scores above the bound are scaled. */
INLINE float gate(const Draw *d, float least) { return d->temperature * (least - 1e-5f * fabsf(least) - 1e-5f); }

/* ids of the next LANES tokens */
INLINE words ids_from(long first) {
  words ids;
  for (int i = 0; i < LANES; i++) ids[i] = (uint32_t)first + i;
  return ids;
}

INLINE void try_one(Draw *d, const float *x, long id, uint32_t bits) {
  float value = scaled(d, x[id]);
  if (!(value >= d->least)) return;
  float sum = value + noise_of(bits);
  if (sum > d->sum || (sum == d->sum && id < d->token)) d->sum = sum, d->token = id;
}

/* the bound below which no token can win any more */
INLINE float winning_gate(const Draw *d) {
  float lowest = d->sum - MOST_NOISE;
  return gate(d, lowest > d->least ? lowest : d->least);
}

static void draw_one(Draw *d, const float *x, long n, long likeliest) {
  const words lanes = ids_from(0);
  d->sum = -INFINITY, d->token = likeliest;
  try_one(d, x, likeliest, random_bits(ids_from(likeliest), d->key)[0]);
  float threshold = winning_gate(d);
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    floats above = load(x + i) - all(d->top);
    if (!any(above >= all(threshold))) continue;
    words bits = random_bits(lanes + (uint32_t)i, d->key);
    ints chance = above * all(d->rate) + noise_bound(bits) >= all(d->sum);
    if (!any(chance)) continue;
    for (int lane = 0; lane < LANES; lane++)
      if (chance[lane]) try_one(d, x, i + lane, bits[lane]);
    threshold = winning_gate(d);
  }
  for (; i < n; i++)
    if (x[i] - d->top >= threshold) try_one(d, x, i, random_bits(ids_from(i), d->key)[0]);
}

/* The smallest of the values that has less than `limit` strictly above it, by weight (NULL: one each). The values are
 * at most 0; both lists are overwritten. Bucket by bucket of the values' upper bits, then of the next, then of the
 * last: without the sign, the bits of a larger value are a smaller integer. */
static float smallest_within(float *values, float *weights, long count, double limit, double *buckets) {
  static const struct {
    int shift, last;
  } levels[] = {{20, BUCKETS - 1}, {10, 1023}, {0, 1023}};
  double above = 0;
  uint32_t key = 0;
  for (int level = 0; level < 3; level++) {
    int shift = levels[level].shift, last = levels[level].last, chosen = last;
    loose_word *bits = (loose_word *)values;
    memset(buckets, 0, sizeof(double) * (last + 1));
    if (weights)
      for (long i = 0; i < count; i++) buckets[bits[i] >> shift & last] += weights[i];
    else
      for (long i = 0; i < count; i++) buckets[bits[i] >> shift & last] += 1;
    double total = above;
    for (int bucket = 0; bucket <= last && total < limit; bucket++) {
      if (!(buckets[bucket] > 0)) continue;
      chosen = bucket, above = total;
      total += buckets[bucket];
    }
    key |= (uint32_t)chosen << shift;
    long kept = 0;
    for (long i = 0; i < count; i++) { /* branch-free: it would be mispredicted half of the time */
      long here = (int)(bits[i] >> shift & last) == chosen;
      bits[kept] = bits[i];
      if (weights) weights[kept] = weights[i];
      kept += here;
    }
    count = kept;
  }
  float found;
  memcpy(&found, &key, 4);
  return -found;
}

/* the negated scaled scores that are at least `bound`, in order; never those of forbidden tokens */
static long scores_from(float *to, const Draw *d, const float *x, long n, float bound) {
  bound = bound > -3e38f ? bound : -3e38f;
  float threshold = gate(d, bound);
  long count = 0, i = 0;
  for (; i + LANES <= n; i += LANES) {
    if (!any(load(x + i) - all(d->top) >= all(threshold))) continue;
    float here[LANES];
    store(here, (load(x + i) - all(d->top)) / all(d->temperature));
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++) {
      to[count] = -here[lane];
      count += here[lane] >= bound;
    }
  }
  for (; i < n; i++) {
    to[count] = -scaled(d, x[i]);
    count += -to[count] >= bound;
  }
  return count;
}

/* exponentials of the negated values; returns their sum */
static double weigh(float *to, const float *values, long n) {
  double total = 0;
  for (long i = 0; i < n; i += LANES) { /* the buffers are padded past the end */
    floats weights = exponential(-load(values + i));
    store(to + i, weights);
    for (int lane = 0; lane < LANES && i + lane < n; lane++) total += weights[lane];
  }
  return total;
}

/* the sum of the exponentials of all scaled scores */
static double mass_of(const Draw *d, const float *x, long n) {
  double total = 0;
  long i = 0;
  for (; i + STRETCH <= n; i += STRETCH) {
    floats part = all(0);
#pragma GCC unroll 16
    for (int j = 0; j < STRETCH; j += LANES) part += exponential((load(x + i + j) - all(d->top)) * all(d->rate));
    total += sum(part);
  }
  for (; i < n; i++) total += exponential_one((x[i] - d->top) * d->rate);
  return total;
}

/* A score that at least k tokens reach, and not many more: the k-th largest of the largest scores of all stretches of
 * the vocabulary. scratch: a float per stretch. */
static float reached_by(long k, const Draw *d, const float *x, long n, float *scratch, double *buckets) {
  long count = n / STRETCH;
  if (k > count) return -INFINITY;
  for (long stretch = 0; stretch < count; stretch++) {
    floats most = load(x + stretch * STRETCH);
#pragma GCC unroll 16
    for (int j = LANES; j < STRETCH; j += LANES) {
      floats here = load(x + stretch * STRETCH + j);
      most = choose(here > most, here, most);
    }
    scratch[stretch] = -scaled(d, largest(most));
  }
  return smallest_within(scratch, NULL, count, (double)k, buckets);
}

/* The least scaled score that top_k and top_p keep. scratch: twice the vocabulary and two vectors. */
static float ranked(const Draw *d, const float *x, long n, long k, float p, float *scratch, double *buckets) {
  p = p > FLT_MIN ? p : FLT_MIN; /* a top_p too small for a float still keeps the likeliest token */
  float *values = scratch, *weights = scratch + n + LANES, least = -INFINITY;
  double mass;
  long count;
  if (k > 0 && k < n) {
    count = scores_from(values, d, x, n, reached_by(k, d, x, n, weights, buckets));
    least = smallest_within(values, NULL, count, (double)k, buckets);
    if (p >= 1) return least;
    count = scores_from(values, d, x, n, least);
    mass = weigh(weights, values, count);
  } else {
    if (p >= 1) return least;
    mass = mass_of(d, x, n);
    /* n tokens of this likelihood have less mass than top_p drops, so it is below every score kept */
    count = scores_from(values, d, x, n, (float)log((1 - (double)p) * mass / (double)n) - 1e-3f);
    weigh(weights, values, count);
  }
  float within = smallest_within(values, weights, count, (double)p * mass, buckets);
  return within > least ? within : least;
}

/* the score of a token that came before, `count` times in the output */
INLINE float penalized(const Sampling *s, long row, float score, float count) {
  float repetition = s->repetition[row];
  float value = add_rounded(score > 0 ? score / repetition : score * repetition, -s->frequency[row], count);
  return value - (count > 0 ? s->presence[row] : 0);
}

static void penalize(const Sampling *s, long row, float *x, long n) {
  const uint8_t *seen = s->seen + s->penalty_slot[row] * n;
  const float *counts = s->counts + s->penalty_slot[row] * n;
  for (long first = 0; first < n; first += 8) {
    long end = first + 8 < n ? first + 8 : n;
    uint64_t several = 0;
    memcpy(&several, seen + first, end - first);
    if (!several) continue;
    for (long i = first; i < end; i++)
      if (seen[i]) x[i] = penalized(s, row, x[i], counts[i]);
  }
}

/* Counts the draft tokens before this line as if they had been drawn: each one's score anew, from its original. */
static void penalize_drafts(const Choice *c, long line, float *to) {
  const Sampling *s = c->state;
  long row = c->rows[line], first = line;
  const float *counts = s->counts + s->penalty_slot[row] * c->n, *x = c->scores + line * c->n;
  while (first > 0 && c->expected[first - 1] >= 0) first--;
  for (long i = first; i < line; i++) {
    long token = c->expected[i];
    float count = counts[token];
    for (long j = first; j < line; j++) count += c->expected[j] == token;
    to[token] = penalized(s, row, x[token], count);
  }
}

static void allow_only(const uint32_t *mask, float *x, long n) {
  for (long first = 0; first < n; first += 32) {
    uint32_t allowed = mask[first / 32];
    if (allowed == 0xffffffffu) continue;
    long end = first + 32 < n ? first + 32 : n;
    for (long i = first; i < end; i++)
      if (!(allowed >> (i - first) & 1)) x[i] = -INFINITY;
  }
}

/* the line's scores with all logit edits: in `scratch`, or the scores themselves if there are none */
static const float *edited(const Choice *c, long line, float *scratch) {
  const Sampling *s = c->state;
  const float *x = c->scores + line * c->n;
  long row = c->rows[line], mask = c->mask_of ? c->mask_of[line] : -1;
  long ends = mask < 0 && c->positions[line] < s->first_free_end[row] ? s->ends_count[row] : 0;
  if (!s->bias_count[row] && s->penalty_slot[row] < 0 && !ends && mask < 0) return x;
  memcpy(scratch, x, sizeof(float) * c->n);
  if (s->penalty_slot[row] >= 0) {
    penalize(s, row, scratch, c->n);
    if (c->expected) penalize_drafts(c, line, scratch);
  }
  for (long i = s->bias_first[row]; i < s->bias_first[row] + s->bias_count[row]; i++)
    scratch[s->bias_ids[i]] += s->bias_amounts[i];
  for (long i = s->ends_first[row]; i < s->ends_first[row] + ends; i++) scratch[s->ends_ids[i]] = -INFINITY;
  if (mask >= 0) allow_only(c->masks + mask * ((c->n + 31) / 32), scratch, c->n);
  return scratch;
}

static void choose_one(const Choice *c, long line, float *scratch) {
  const Sampling *s = c->state;
  long row = c->rows[line], n = c->n;
  double *buckets = (double *)scratch;
  scratch += 2 * BUCKETS;
  const float *x = edited(c, line, scratch);
  scratch += n;
  float best = largest_of(x, n);
  long token = isfinite(best) ? index_of(best, x, n) : 0;
  if (s->temperature[row] > 0 && isfinite(best)) {
    float least = s->min_p[row] > 0 ? (float)log((double)s->min_p[row]) : -INFINITY;
    Draw d = {.top = best, .temperature = s->temperature[row], .least = least};
    d.rate = 1 / (d.temperature > 1e-30f ? d.temperature : 1e-30f); /* below, other scores are infinitely far away */
    d.key = draw_key(s->seed[row], s->sample[row], c->positions[line]);
    long k = s->top_k[row];
    if (k > 0 || s->top_p[row] < 1) {
      float within = ranked(&d, x, n, k, s->top_p[row], scratch, buckets);
      d.least = within > least ? within : least;
    }
    draw_one(&d, x, n, token);
    token = d.token;
  }
  c->tokens[line] = token, c->best[line] = best;
}

/* Adds the chosen tokens to what penalties count, of each row up to the first that is not the draft's. */
static void count_chosen(const Choice *c, long lines) {
  const Sampling *s = c->state;
  int rejected = 0;
  for (long line = 0; line < lines; line++) {
    long slot = s->penalty_slot[c->rows[line]], token = c->tokens[line];
    if (slot >= 0 && !rejected) {
      s->seen[slot * c->n + token] = 1;
      s->counts[slot * c->n + token] += 1;
    }
    if (c->expected) rejected = c->expected[line] >= 0 && (rejected || c->expected[line] != token);
  }
}

typedef struct {
  const Choice *choice;
  _Atomic int failed;
} ChoicePieces;

static void choice_piece(void *work, long line) {
  ChoicePieces *p = work;
  long n = p->choice->n, floats_needed = 2 * BUCKETS + (3 * n + 3 * LINE - 1) / LINE * LINE;
  float *scratch = scratch_for(SCRATCH_DRAW, sizeof(float) * floats_needed);
  if (scratch)
    choose_one(p->choice, line, scratch);
  else
    p->failed = 1;
}

/* Returns 0, or 1 if memory ran out. */
API int shoal_draw(const Choice *c, long lines, int threads) {
  ChoicePieces pieces = {.choice = c};
  share(threads_for(threads, lines * c->n), lines, choice_piece, &pieces);
  if (pieces.failed) return 1;
  count_chosen(c, lines); /* only now: lines of one row are chosen at the same time */
  return 0;
}
