/* Products of a few rows with weights, as they come up while sequences decode: what takes time is to read the weights.
 *
 * oneDNN lays weights out in panels of 64 outputs, [outputs / 64][inputs][64], or for integers
 * [outputs / 64][inputs / 4][64][4], and its own kernels, made for many rows, read them at three quarters of the
 * memory's speed. Here a panel's sums stay in registers for MOST_ROWS rows at a time, and while they are computed the
 * next weights are fetched. native.py compiles this for the CPU that it runs on.
 *
 * Each sum is made in the same order however many rows there are, so a row's result does not depend on the others.
 */

#include <stdint.h>
#include <string.h>

enum { LANES = 16, PANEL = 64, VECTORS = PANEL / LANES }; /* floats of a vector; outputs of a panel; its vectors */
enum { MOST_ROWS = 6 };                                    /* 28 sums and 4 weights fill the 32 registers */
enum { LINE = 64, LINES = 4, AHEAD_BYTES = 4096 };         /* a cache line; lines of a panel that one step reads */

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose_vec __attribute__((vector_size(LANES * 4), aligned(4))); /* anywhere in memory */
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1)));

/* What to fetch while a block of rows is computed, in its equal steps. */
typedef struct {
    const char *first;
    int64_t lines; /* in each step */
} Ahead;

/* A single block reads the panel from memory itself, so it fetches what it needs next; of several, the first finds the
 * panel in the cache, as each has fetched its part of it while the panel before was computed. */
static Ahead ahead_of(const void *panel, int64_t steps, int64_t block, int64_t blocks) {
    const char *first = panel;
    if (blocks == 1) return (Ahead){first + AHEAD_BYTES, LINES};
    int64_t panel_bytes = steps * LINES * LINE;
    return (Ahead){first + panel_bytes + panel_bytes * block / blocks, (LINES + blocks - 1) / blocks};
}

static inline __attribute__((always_inline)) void fetch(Ahead ahead, int64_t step) {
    for (int64_t line = 0; line < ahead.lines; line++)
        __builtin_prefetch(ahead.first + (step * ahead.lines + line) * LINE, 0, 2);
}

#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)
#define BY_ROWS(rows, call) /* `call(rows)` with a constant, so that each sum has its register */ \
    switch (rows) { \
    case 1: call(1); \
    case 2: call(2); \
    case 3: call(3); \
    case 4: call(4); \
    case 5: call(5); \
    default: call(MOST_ROWS); \
    }

/* `rows` rows times one panel. */
static inline __attribute__((always_inline)) void float_block(
    const int rows, const float *input, const float *panel, int64_t inputs, const float *bias, float *output,
    int64_t outputs, Ahead ahead) {
    vec sums[MOST_ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sums[r][v] = bias ? *(const loose_vec *)(bias + v * LANES) : (vec){};
    for (int64_t k = 0; k < inputs; k++) {
        vec weights[VECTORS];
        EACH_VECTOR weights[v] = *(const loose_vec *)(panel + k * PANEL + v * LANES);
        fetch(ahead, k);
        EACH_ROW EACH_VECTOR sums[r][v] += weights[v] * input[r * inputs + k];
    }
    EACH_ROW EACH_VECTOR *(loose_vec *)(output + r * outputs + v * LANES) = sums[r][v];
}

/* input [rows, inputs] · weightsᵀ + bias = output [rows, outputs]; bias may be 0. */
void float_few_rows(
    const float *input, int64_t rows, int64_t inputs, const float *weights, int64_t outputs, const float *bias,
    float *output) {
    int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < outputs; at += PANEL)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t row = rows * b / blocks, own = rows * (b + 1) / blocks - row;
            const float *panel = weights + at * inputs, *own_bias = bias ? bias + at : 0;
            Ahead ahead = ahead_of(panel, inputs, b, blocks);
#define BLOCK(n) \
    float_block(n, input + row * inputs, panel, inputs, own_bias, output + row * outputs + at, outputs, ahead); \
    break
            BY_ROWS(own, BLOCK)
#undef BLOCK
        }
}

/* Round rows [rows, inputs] to unsigned bytes around 128; largest [rows] is each row's largest magnitude, which becomes
 * 127 steps. A row of zeros becomes anything, and is then multiplied with its largest, 0. */
void round_rows(const float *input, int64_t rows, int64_t inputs, uint8_t *rounded, float *largest) {
#pragma omp parallel for schedule(static) if (rows > MOST_ROWS) /* for fewer, waking threads takes longer */
    for (int64_t row = 0; row < rows; row++) {
        const float *values = input + row * inputs;
        ints most = {}; /* a float's bits without the sign are in its order, and what is not a number is above all */
        for (int64_t k = 0; k < inputs; k += LANES) {
            ints size = (ints)*(const loose_vec *)(values + k) & 0x7fffffff, larger = size > most;
            most = (size & larger) | (most & ~larger);
        }
        int32_t bits = 0;
        for (int i = 0; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
        memcpy(largest + row, &bits, sizeof bits);
        float steps = 127.0f / largest[row];
        for (int64_t k = 0; k < inputs; k += LANES) {
            vec shifted = *(const loose_vec *)(values + k) * steps + 128.5f; /* half a step: the conversion cuts off */
            *(bytes *)(rounded + row * inputs + k) =
                __builtin_convertvector(__builtin_convertvector(shifted, ints), bytes);
        }
    }
}

#ifdef __AVX512VNNI__
#include <immintrin.h>

static inline __attribute__((always_inline)) void int8_block(
    const int rows, const uint8_t *rounded, const float *largest, const int8_t *panel, int64_t inputs,
    const int32_t *offsets, const float *scales, float *output, int64_t outputs, Ahead ahead) {
    __m512i sums[MOST_ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sums[r][v] = _mm512_loadu_si512(offsets + v * LANES);
    for (int64_t k = 0; k < inputs; k += 4) {
        __m512i weights[VECTORS];
        EACH_VECTOR weights[v] = _mm512_loadu_si512(panel + k * PANEL + v * LINE);
        fetch(ahead, k / 4);
        EACH_ROW {
            int32_t four;
            memcpy(&four, rounded + r * inputs + k, sizeof four);
            EACH_VECTOR sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], _mm512_set1_epi32(four), weights[v]);
        }
    }
    EACH_ROW EACH_VECTOR *(loose_vec *)(output + r * outputs + v * LANES) =
        (vec)_mm512_cvtepi32_ps(sums[r][v]) * *(const loose_vec *)(scales + v * LANES) * largest[r];
}

/* As float_few_rows, with the rows rounded by round_rows. offsets [outputs] take off what the rows' 128 adds: -128 times
 * the sum of an output's weights. scales [outputs]: what an integer of an output is worth where a row's largest is 1. */
void int8_few_rows(
    const uint8_t *rounded, const float *largest, int64_t rows, int64_t inputs, const int8_t *weights, int64_t outputs,
    const int32_t *offsets, const float *scales, float *output) {
    int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < outputs; at += PANEL)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t row = rows * b / blocks, own = rows * (b + 1) / blocks - row;
            const int8_t *panel = weights + at * inputs;
            Ahead ahead = ahead_of(panel, inputs / 4, b, blocks);
#define BLOCK(n) \
    int8_block( \
        n, rounded + row * inputs, largest + row, panel, inputs, offsets + at, scales + at, output + row * outputs + at, \
        outputs, ahead); \
    break
            BY_ROWS(own, BLOCK)
#undef BLOCK
        }
}
#endif
