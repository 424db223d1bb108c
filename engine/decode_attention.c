/* Attention of decoding sequences, one query row each, over the KV pool of attention.py: all of them in one call.
 *
 * torch's own kernel takes one sequence at a time, as their contexts lie anywhere, and at some hundred tokens the calls
 * cost more than reading the keys does. native.py compiles this for the CPU that it runs on and for one HEAD_DIM, a
 * multiple of LANES. The vector types are GCC's; where registers are narrower, a vector is several of them.
 *
 * The softmax is flash attention's: tile by tile, with a running maximum. Each sequence and head is computed by one
 * thread in one order, so a row's result does not depend on who else is in the batch.
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LEAST -87.0f
enum { LANES = 16, VECTORS = HEAD_DIM / LANES, TILE = 32 }; /* floats of a vector; of a head; tokens at a time */

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));

static inline vec load(const float *at) {
    vec value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void store(float *at, vec value) { memcpy(at, &value, sizeof value); }

static inline float sum(vec v) {
    v += __builtin_shuffle(v, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (ints){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return v[0] + v[1];
}

/* e^x for x <= 0: a power of two times a polynomial (Cephes' expf). */
static inline vec exponential(vec x) {
    ints far = x < LEAST; /* would leave the exponent's range */
    x = (vec)(((ints)x & ~far) | ((ints)((vec){} + LEAST) & far));
    vec scaled = x * 1.44269504f - 0.5f;
    ints whole = __builtin_convertvector(scaled, ints); /* cuts off, so that the rest is within +-0.5 */
    vec count = __builtin_convertvector(whole, vec);
    vec rest = x - count * 0.693359375f + count * 2.12194440e-4f;
    vec y = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    return y * (vec)((whole + 127) << 23);
}

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
