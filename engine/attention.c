/* Attention over the KV pool of attention.py: of all decoding sequences in one call, and of a sequence's many rows.
 *
 * torch's own kernel takes one sequence at a time, as their contexts lie anywhere; at some hundred tokens the calls
 * cost more than reading the keys does, and with many rows it reaches a seventh of the CPU's speed. native.py compiles
 * this for the CPU that it runs on and for one HEAD_DIM, a multiple of LANES.
 *
 * The softmax is flash attention's: tile by tile, with a running maximum. Each row and head is computed by one thread
 * in one order, so a row's result does not depend on who else is in the batch.
 */

#include <float.h>
#include <math.h>

#include "vectors.h"

enum { VECTORS = HEAD_DIM / LANES, TILE = 32 }; /* of a head; tokens at a time */

/* One query head over one tile: adds to the softmax's total and to the output, both relative to the largest score so
 * far, and returns the largest now. */
static float attend_tile(
    const float *query, const float *keys, const float *values, int tokens, float largest, float *total, float *output) {
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
    for (int t = tokens; t < TILE; t++) weights[t] = -FLT_MAX; /* becomes a weight of nearly 0, times no value */
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
        for (int64_t at = parts[2 * p], end = parts[2 * p + 1]; at < end; at += TILE)
            for (int64_t g = 0; g < group; g++)
                largest[g] = attend_tile(
                    scaled + g * HEAD_DIM, keys + at * HEAD_DIM, values + at * HEAD_DIM, end - at < TILE ? end - at : TILE,
                    largest[g], total + g, output + g * HEAD_DIM);
    for (int64_t g = 0; g < group; g++) {
        for (int d = 0; d < HEAD_DIM; d++) output[g * HEAD_DIM + d] /= total[g];
        lse[g] = largest[g] + logf(total[g]);
    }
}

/* Store each sequence's new key and value in the pool, then attend to all that it sees. Strides are in floats.
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
            int64_t new = new_slots[n] * HEAD_DIM, row = rows[n], first = first_parts[n], at = (n * kv_heads + h) * group;
            memcpy(keys + new, key + h * key_head + row * key_row, HEAD_DIM * sizeof *keys);
            memcpy(values + new, value + h * value_head + row * value_row, HEAD_DIM * sizeof *values);
            attend(
                query + h * group * query_head + row * query_row, query_head, keys, values, parts + 2 * first,
                first_parts[n + 1] - first, group, scale, output + at * HEAD_DIM, lse + at);
        }
}

/* --- many rows of one sequence ---------------------------------------------------------------------------------- */

enum { KEYS = 64, QUERIES = 96 }; /* tokens of a tile; rows of a thread's task */
enum { ROWS = 6, GROUP = 4 };     /* rows whose sums stay in registers, and so many vectors of each */

#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)
#define EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)

static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

static inline float most(vec v) {
    v = larger(v, __builtin_shuffle(v, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = larger(v, __builtin_shuffle(v, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = larger(v, __builtin_shuffle(v, (ints){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    return v[0] > v[1] ? v[0] : v[1];
}

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

/* What rows have seen so far: the largest score, the softmax's total, and the output, of which only the first `count`
 * are there. */
typedef struct {
    int count;
    float *largest, *total, *output;
    int64_t output_row;
} Rows;

static inline __attribute__((always_inline)) void add_values(
    const int vectors, Rows rows, const float *fades, const float *weights, const float *values, int tokens, int dim) {
    vec sums[ROWS][GROUP];
    EACH_ROW EACH_VECTOR
        sums[r][v] = r < rows.count ? load(rows.output + r * rows.output_row + dim + v * LANES) * fades[r] : (vec){};
    multiply(vectors, sums, weights, KEYS, values + dim, HEAD_DIM, tokens);
    EACH_ROW if (r < rows.count) EACH_VECTOR store(rows.output + r * rows.output_row + dim + v * LANES, sums[r][v]);
}

/* The rows of one head attend to a tile of tokens; row r sees those from first[r] on and before end[r]. */
static void attend_rows(
    Rows rows, const float queries[ROWS][HEAD_DIM], const float keys[HEAD_DIM][KEYS], const float *values, int tokens,
    const int64_t *first, const int64_t *end, float scale) {
    enum { vectors = KEYS / LANES };
    vec scores[ROWS][GROUP] = {};
    float weights[ROWS][KEYS], fades[ROWS];
    multiply(vectors, scores, queries[0], HEAD_DIM, keys[0], KEYS, HEAD_DIM);
    EACH_ROW {
        if (first[r] > 0 || end[r] < KEYS)
            EACH_VECTOR {
                ints number = (ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + v * LANES;
                ints is_seen = (number >= (int32_t)first[r]) & (number < (int32_t)end[r]);
                scores[r][v] = choose(is_seen, scores[r][v], (vec){} - FLT_MAX);
            }
        vec top = scores[r][0], sums = {};
        EACH_VECTOR top = larger(top, scores[r][v]);
        float before = rows.largest[r], largest = most(top) * scale;
        largest = largest > before ? largest : before;
        EACH_VECTOR {
            vec exponentials = exponential(scores[r][v] * scale - largest);
            store(weights[r] + v * LANES, exponentials);
            sums += exponentials;
        }
        fades[r] = expf(before - largest);
        rows.largest[r] = largest;
        rows.total[r] = rows.total[r] * fades[r] + sum(sums);
    }
    for (int dim = 0; dim + GROUP * LANES <= HEAD_DIM; dim += GROUP * LANES)
        add_values(GROUP, rows, fades, weights[0], values, tokens, dim);
    enum { REST = VECTORS % GROUP };
    if (REST) add_values(REST, rows, fades, weights[0], values, tokens, HEAD_DIM - REST * LANES);
}

static int64_t within(int64_t number, int64_t least, int64_t largest) {
    return number < least ? least : number > largest ? largest : number;
}

/* The last `rows` tokens of a sequence of `context` attend to those before them and to themselves, each to `window` at
 * most. Their keys and values are in the pool already. Strides are in floats.
 *
 * pool_keys, pool_values: [kv_heads, slots, HEAD_DIM]; parts [count, 2]: slots that follow each other, first and end,
 * of the tokens from `first` on; output: [rows, kv_heads, group, HEAD_DIM]; lse: [rows, kv_heads, group].
 */
void chunk_attention(
    const float *query, int64_t query_head, int64_t query_row, const float *pool_keys, const float *pool_values,
    int64_t slots, const int64_t *parts, int64_t count, int64_t first, int64_t rows, int64_t context, int64_t window,
    int64_t kv_heads, int64_t group, float scale, float *output, float *lse) {
    int64_t heads = kv_heads * group, row_floats = heads * HEAD_DIM, tasks = (rows + QUERIES - 1) / QUERIES;
    int64_t before = context - rows;
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (int64_t task = tasks - 1; task >= 0; task--) /* the longest first */
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t row = task * QUERIES, own = rows - row < QUERIES ? rows - row : QUERIES, position = first;
            float largest[group][QUERIES + ROWS], total[group][QUERIES + ROWS], keys[HEAD_DIM][KEYS] = {};
            for (int64_t g = 0; g < group; g++)
                for (int64_t r = 0; r < QUERIES + ROWS; r++) largest[g][r] = -FLT_MAX, total[g][r] = 0;
            for (int64_t r = row; r < row + own; r++)
                memset(output + r * row_floats + h * group * HEAD_DIM, 0, group * HEAD_DIM * sizeof *output);
            for (int64_t p = 0; p < count; p++)
                for (int64_t at = parts[2 * p]; at < parts[2 * p + 1]; at += KEYS) {
                    int64_t tokens = within(parts[2 * p + 1] - at, 0, KEYS), from = position;
                    position += tokens;
                    /* Nothing of the tile is seen by the task's last row, or by its first. */
                    if (from > before + row + own - 1 || position <= before + row + 1 - window) continue;
                    for (int t = 0; t < tokens; t++)
                        for (int d = 0; d < HEAD_DIM; d++) keys[d][t] = pool_keys[(h * slots + at + t) * HEAD_DIM + d];
                    for (int64_t g = 0; g < group; g++)
                        for (int64_t r = row; r < row + own; r += ROWS) {
                            int64_t some = within(row + own - r, 0, ROWS), starts[ROWS], ends[ROWS];
                            float queries[ROWS][HEAD_DIM] = {};
                            if (from > before + r + some - 1 || position <= before + r + 1 - window) continue;
                            for (int64_t i = 0; i < ROWS; i++) {
                                starts[i] = within(before + r + i + 1 - window - from, 0, KEYS);
                                ends[i] = within(before + r + i + 1 - from, 0, tokens);
                            }
                            int64_t head = h * group + g;
                            for (int64_t i = 0; i < some; i++)
                                memcpy(queries[i], query + head * query_head + (r + i) * query_row, sizeof queries[i]);
                            Rows state = {some, largest[g] + r - row, total[g] + r - row,
                                          output + r * row_floats + head * HEAD_DIM, row_floats};
                            attend_rows(
                                state, queries, keys, pool_values + (h * slots + at) * HEAD_DIM, tokens, starts, ends,
                                scale);
                        }
                }
            for (int64_t g = 0; g < group; g++)
                for (int64_t r = 0; r < own; r++) {
                    int64_t head = (row + r) * heads + h * group + g;
                    for (int d = 0; d < HEAD_DIM; d++) output[head * HEAD_DIM + d] /= total[g][r];
                    lse[head] = largest[g][r] + logf(total[g][r]);
                }
        }
}
