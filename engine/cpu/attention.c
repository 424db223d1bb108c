/* Attention over the KV pool of attention.py: of all decoding sequences in one call, and of a sequence's many rows.
 *
 * torch's kernel takes one sequence at a time, because contexts are scattered. At a few hundred tokens the calls cost
 * more than reading the keys, and with many rows it reaches a seventh of the CPU's speed. native.py compiles this for
 * the local CPU and for one HEAD_DIM, a multiple of LANES.
 *
 * The softmax is flash attention's: tile by tile, with a running maximum. Each row and head is computed by one thread
 * in a fixed order, so a row's result does not depend on the rest of the batch.
 */

#include <float.h>
#include <math.h>

#include "vectors.h"

enum { VECTORS = HEAD_DIM / LANES, TILE = 32 }; /* of a head; tokens at a time */

/* One query head over one tile: adds to the softmax's total and to the output, both relative to the largest score so
 * far, and returns the largest now. */
static float attend_tile(
    const float *query, const float *keys, const float *values, int tokens, float largest, float *total,
    float *output) {
    vec q[VECTORS], sofar[VECTORS], sums = {};
    float weights[TILE];
    float top = largest;
    for (int d = 0; d < VECTORS; d++) q[d] = load(query + d * LANES);
    for (int t = 0; t < tokens; t++) {
        vec products = {};
        for (int d = 0; d < VECTORS; d++) products += q[d] * load(keys + t * HEAD_DIM + d * LANES);
        weights[t] = sum(products);
        top = weights[t] > top ? weights[t] : top;
    }
    for (int t = tokens; t < TILE; t++) weights[t] = -FLT_MAX; /* its weight is nearly 0, and it has no value */
    for (int t = 0; t < TILE; t += LANES) {
        vec exponentials = exponential(load(weights + t) - top);
        store(weights + t, exponentials);
        sums += exponentials;
    }
    float fade = expf(largest - top);
    *total = *total * fade + sum(sums);
    for (int d = 0; d < VECTORS; d++) sofar[d] = load(output + d * LANES) * fade;
    for (int t = 0; t < tokens; t++)
        for (int d = 0; d < VECTORS; d++) sofar[d] += weights[t] * load(values + t * HEAD_DIM + d * LANES);
    for (int d = 0; d < VECTORS; d++) store(output + d * LANES, sofar[d]);
    return top;
}

/* The `group` query heads of one sequence that share a key/value head. */
static void attend(
    const float *query, int64_t query_head, const float *keys, const float *values, const int64_t *parts, int64_t count,
    int64_t group, float scale, float *output, float *lse) {
    float scaled[group * HEAD_DIM], largest[group], total[group];
    for (int64_t g = 0; g < group; g++) {
        for (int d = 0; d < HEAD_DIM; d++) scaled[g * HEAD_DIM + d] = query[g * query_head + d] * scale;
        largest[g] = -FLT_MAX;
        total[g] = 0;
    }
    memset(output, 0, group * HEAD_DIM * sizeof *output);
    for (int64_t p = 0; p < count; p++)
        for (int64_t at = parts[2 * p], end = parts[2 * p + 1]; at < end; at += TILE) {
            int tokens = end - at < TILE ? end - at : TILE;
            for (int64_t g = 0; g < group; g++)
                largest[g] = attend_tile(
                    scaled + g * HEAD_DIM, keys + at * HEAD_DIM, values + at * HEAD_DIM, tokens, largest[g], total + g,
                    output + g * HEAD_DIM);
        }
    for (int64_t g = 0; g < group; g++) {
        for (int d = 0; d < HEAD_DIM; d++) output[g * HEAD_DIM + d] /= total[g];
        lse[g] = largest[g] + logf(total[g]);
    }
}

/* Store each sequence's new key and value in the pool, then attend to all visible slots. Strides are in floats.
 *
 * pool_keys, pool_values: [kv_heads, slots, HEAD_DIM]; output: [sequences, kv_heads, group, HEAD_DIM]; lse, the
 * log-sum-exp of the scores: [sequences, kv_heads, group]. Of sequence n, rows[n] is its row in the step, new_slots[n]
 * where its new token goes, and parts[first_parts[n]] to parts[first_parts[n + 1] - 1] are the slots that it sees, each
 * as first and end.
 */
void decode_attention(
    const float *query, int64_t query_head, int64_t query_row, const float *key, int64_t key_head, int64_t key_row,
    const float *value, int64_t value_head, int64_t value_row, float *pool_keys, float *pool_values, int64_t slots,
    const int64_t *rows, const int64_t *new_slots, const int64_t *first_parts, const int64_t *parts, int64_t sequences,
    int64_t kv_heads, int64_t group, float scale, float *output, float *lse) {
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (int64_t h = 0; h < kv_heads; h++)
        for (int64_t n = 0; n < sequences; n++) {
            float *keys = pool_keys + h * slots * HEAD_DIM, *values = pool_values + h * slots * HEAD_DIM;
            int64_t new = new_slots[n] * HEAD_DIM, row = rows[n], first = first_parts[n];
            int64_t at = (n * kv_heads + h) * group;
            memcpy(keys + new, key + h * key_head + row * key_row, HEAD_DIM * sizeof *keys);
            memcpy(values + new, value + h * value_head + row * value_row, HEAD_DIM * sizeof *values);
            attend(
                query + h * group * query_head + row * query_row, query_head, keys, values, parts + 2 * first,
                first_parts[n + 1] - first, group, scale, output + at * HEAD_DIM, lse + at);
        }
}

/* --- many rows of one sequence ---------------------------------------------------------------------------------- */

enum { KEYS = 64, SPAN = 8, QUERIES = 96 }; /* tokens per tile; tiles laid out at a time; rows per thread task */
/* Rows whose sums stay in registers, and vectors of each: with AVX-512, 24 of 32 registers. With AVX, a vector is two
 * of 16 registers; with more sums, most would be in memory, and compilation would be slow. */
#ifdef __AVX512F__
enum { ROWS = 6, GROUP = 4 };
#else
enum { ROWS = 6, GROUP = 1 };
#endif

#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)
#define EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)

static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

static inline float most(vec v) {
    v = larger(v, __builtin_shuffle(v, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = larger(v, __builtin_shuffle(v, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = larger(v, __builtin_shuffle(v, (ints){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    return v[0] > v[1] ? v[0] : v[1];
}

/* Consecutive tokens in the pool, with transposed keys. */
typedef struct {
    float keys[HEAD_DIM][KEYS];
    const float *values;
    int64_t position; /* of the first of them in the sequence */
    int tokens;
} Tile;

/* Consecutive rows of one head, and their partial softmax, relative to the largest score so far. */
typedef struct {
    float queries[ROWS][HEAD_DIM], output[ROWS][HEAD_DIM];
    vec totals[ROWS]; /* of the softmax; a row's total is the sum of its lanes */
    vec largest;      /* one row per lane */
} Rows;

/* sums [ROWS][vectors] += left [ROWS, steps] · right [steps, vectors]. */
static inline __attribute__((always_inline)) void multiply(
    const int vectors, vec sums[ROWS][GROUP], const float *left, int left_row, const float *right, int right_row,
    int steps) {
    for (int k = 0; k < steps; k++) {
        vec row[GROUP];
        EACH_VECTOR row[v] = load(right + k * right_row + v * LANES);
        EACH_ROW EACH_VECTOR sums[r][v] += row[v] * left[r * left_row + k];
    }
}

static inline __attribute__((always_inline)) void add_values(
    const int vectors, Rows *rows, vec fades, const float *weights, const Tile *tile, int dim) {
    vec sums[ROWS][GROUP];
    EACH_ROW EACH_VECTOR sums[r][v] = load(rows->output[r] + dim + v * LANES) * fades[r];
    multiply(vectors, sums, weights, KEYS, tile->values + dim, HEAD_DIM, tile->tokens);
    EACH_ROW EACH_VECTOR store(rows->output[r] + dim + v * LANES, sums[r][v]);
}

/* Some rows' scores for GROUP vectors of a tile's keys. */
static inline __attribute__((always_inline)) void score_group(
    vec scores[ROWS][KEYS / LANES], int first, const Rows *rows, const Tile *tile) {
    enum { vectors = GROUP };
    vec sums[ROWS][GROUP] = {};
    multiply(vectors, sums, rows->queries[0], HEAD_DIM, tile->keys[0] + first * LANES, KEYS, HEAD_DIM);
    EACH_ROW EACH_VECTOR scores[r][first + v] = sums[r][v];
}

/* Attend to a tile; row r sees its tokens from first + r to before end + r. */
static void attend_rows(Rows *rows, const Tile *tile, int64_t first, int64_t end, float scale) {
    enum { vectors = KEYS / LANES };
    const ints numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int is_whole = first + ROWS <= 1 && end >= KEYS && tile->tokens == KEYS; /* for every row */
    vec scores[ROWS][vectors], before = rows->largest;
    float weights[ROWS][KEYS];
    for (int first_of_group = 0; first_of_group < vectors; first_of_group += GROUP)
        score_group(scores, first_of_group, rows, tile);
    EACH_ROW {
        vec top;
        if (!is_whole) {
            int32_t from = first + r > 0 ? first + r : 0, to = end + r < tile->tokens ? end + r : tile->tokens;
            EACH_VECTOR {
                ints is_seen = (numbers + v * LANES >= from) & (numbers + v * LANES < to);
                scores[r][v] = choose(is_seen, scores[r][v], (vec){} - FLT_MAX);
            }
        }
        top = scores[r][0];
        EACH_VECTOR top = larger(top, scores[r][v]);
        float largest = most(top) * scale;
        rows->largest[r] = largest > before[r] ? largest : before[r];
    }
    vec fades = exponential(before - rows->largest);
    for (int r = 0; r < ROWS; r++) { /* not unrolled: compiling 24 exponentials takes seconds */
        vec total = rows->totals[r] * fades[r];
        EACH_VECTOR {
            vec exponentials = exponential(scores[r][v] * scale - rows->largest[r]);
            store(weights[r] + v * LANES, exponentials);
            total += exponentials;
        }
        rows->totals[r] = total;
    }
    for (int dim = 0; dim + GROUP * LANES <= HEAD_DIM; dim += GROUP * LANES)
        add_values(GROUP, rows, fades, weights[0], tile, dim);
    enum { REST = VECTORS % GROUP };
    if (REST) add_values(REST, rows, fades, weights[0], tile, HEAD_DIM - REST * LANES);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The read position in a sequence's tokens. */
typedef struct {
    int64_t part, slot, position;
} Cursor;

/* Lay out the tiles of one head with tokens from position `first` to `last`; returns their number, and in `is_last`
 * whether they are the last. */
static int lay_out(
    Tile tiles[SPAN], Cursor *cursor, int *is_last, const float *keys, const float *values, const int64_t *parts,
    int64_t count, int64_t first, int64_t last) {
    int filled = 0;
    for (*is_last = 0; filled < SPAN && !*is_last;) {
        Tile *tile = tiles + filled;
        tile->tokens = smaller(parts[2 * cursor->part + 1] - cursor->slot, KEYS);
        tile->position = cursor->position;
        tile->values = values + cursor->slot * HEAD_DIM;
        if (tile->position <= last && tile->position + tile->tokens > first) {
            const float *own = keys + cursor->slot * HEAD_DIM;
            for (int t = 0; t < tile->tokens; t++)
                for (int d = 0; d < HEAD_DIM; d++) tile->keys[d][t] = own[t * HEAD_DIM + d];
            for (int t = tile->tokens; t < KEYS; t++)
                for (int d = 0; d < HEAD_DIM; d++) tile->keys[d][t] = 0;
            filled++;
        }
        cursor->position += tile->tokens;
        cursor->slot += tile->tokens;
        if (cursor->slot == parts[2 * cursor->part + 1] && ++cursor->part < count)
            cursor->slot = parts[2 * cursor->part];
        *is_last = cursor->part == count || cursor->position > last;
    }
    return filled;
}

/* The last `rows` tokens of a sequence of `context` attend to earlier tokens and to themselves, each to at most
 * `window`. Their keys and values are already in the pool. Strides are in floats.
 *
 * pool_keys, pool_values: [kv_heads, slots, HEAD_DIM]; parts [count, 2]: consecutive slots, first and end, of the
 * tokens from `first` on; output: [rows, kv_heads, group, HEAD_DIM]; lse: [rows, kv_heads, group].
 */
void chunk_attention(
    const float *query, int64_t query_head, int64_t query_row, const float *pool_keys, const float *pool_values,
    int64_t slots, const int64_t *parts, int64_t count, int64_t first, int64_t rows, int64_t context, int64_t window,
    int64_t kv_heads, int64_t group, float scale, float *output, float *lse) {
    int64_t heads = kv_heads * group, tasks = (rows + QUERIES - 1) / QUERIES;
    int64_t before = context - rows; /* the position of row 0 */
    const size_t bytes = HEAD_DIM * sizeof *output;
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (int64_t task = tasks - 1; task >= 0; task--) /* longest first */
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t start = task * QUERIES, end = smaller(start + QUERIES, rows);
            int64_t blocks = (end - start + ROWS - 1) / ROWS;
            vec largest[group][QUERIES / ROWS], totals[group][QUERIES]; /* partial softmaxes; sums are in the output */
            Cursor cursor = {0, parts[0], first};
            Tile tiles[SPAN];
            for (int is_first = 1, is_last = 0; !is_last; is_first = 0) {
                int filled = lay_out(
                    tiles, &cursor, &is_last, pool_keys + h * slots * HEAD_DIM, pool_values + h * slots * HEAD_DIM,
                    parts, count, before + start + 1 - window, before + end - 1);
                for (int64_t item = 0; item < group * blocks; item++) {
                    int64_t g = item / blocks, block = item % blocks, head = h * group + g;
                    int64_t row = start + block * ROWS, own = smaller(end - row, ROWS);
                    float *results[ROWS];
                    Rows state;
                    for (int64_t r = 0; r < ROWS; r++) {
                        int64_t there = row + smaller(r, own - 1); /* missing rows repeat the last one */
                        results[r] = output + (there * heads + head) * HEAD_DIM;
                        memcpy(state.queries[r], query + head * query_head + there * query_row, bytes);
                        if (is_first)
                            memset(state.output[r], 0, bytes);
                        else
                            memcpy(state.output[r], results[r], bytes);
                        state.totals[r] = is_first || r >= own ? (vec){} : totals[g][block * ROWS + r];
                    }
                    state.largest = is_first ? (vec){} - FLT_MAX : largest[g][block];
                    for (Tile *tile = tiles; tile < tiles + filled; tile++) {
                        int64_t newest = before + row - tile->position; /* the tile's token that is row 0 itself */
                        if (newest + own - 1 >= 0 && newest + 1 - window < tile->tokens)
                            attend_rows(&state, tile, newest + 1 - window, newest + 1, scale);
                    }
                    largest[g][block] = state.largest;
                    for (int64_t r = 0; r < own; r++) {
                        float total = sum(state.totals[r]);
                        totals[g][block * ROWS + r] = state.totals[r];
                        for (int d = 0; d < HEAD_DIM; d++)
                            results[r][d] = state.output[r][d] / (is_last ? total : 1);
                        lse[(row + r) * heads + head] = state.largest[r] + logf(total);
                    }
                }
            }
        }
}
