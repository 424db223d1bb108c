/* Products of rows with weights that oneDNN has packed in panels of 64 outputs: [outputs / 64][inputs][64], or for
 * integers [outputs / 64][inputs / 4][64][4].
 *
 * While sequences decode there are few rows, and reading the weights dominates; oneDNN's kernels read them at three
 * quarters of the memory's speed. Here a part of a panel that fits into the L1 cache is multiplied with all rows, a
 * block at a time, whose sums stay in registers, while the next part is prefetched. native.py compiles this for the
 * local CPU.
 *
 * Each sum has a fixed order for any number of rows, so a row's result does not depend on the others.
 */

#include "vectors.h"

enum { PANEL = 64, VECTORS = PANEL / LANES }; /* outputs per panel; vectors per panel */
enum { BLOCK_ROWS = 6 };                      /* per block: its 24 sums fit into the 32 registers */
enum { LINE = 64, LINES = 4, STEPS = 128 };   /* bytes; lines of a panel per step; steps per part, 32 KiB */
enum { AHEAD = 4096 };                        /* bytes between reading and prefetching */

typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1)));

/* A part of a panel, as one block of rows reads it, and the lines to prefetch. */
typedef struct {
    const char *weights, *ahead;
    int64_t steps, lines; /* lines to fetch in each step */
    int is_first, is_last; /* of the panel */
} Part;

/* With several blocks, each prefetches its share of the next part. A single block reads this part from memory. */
static Part part_of(const void *panel, int64_t panel_steps, int64_t first, int64_t block, int64_t blocks) {
    int64_t left = panel_steps - first, steps = left < STEPS ? left : STEPS, size = steps * LINES * LINE;
    const char *weights = (const char *)panel + first * LINES * LINE;
    const char *ahead = blocks == 1 ? weights + AHEAD : weights + size + size * block / blocks;
    return (Part){weights, ahead, steps, (LINES + blocks - 1) / blocks, first == 0, left == steps};
}

static inline __attribute__((always_inline)) void fetch(Part part, int64_t step) {
    for (int64_t line = 0; line < part.lines; line++)
        __builtin_prefetch(part.ahead + (step * part.lines + line) * LINE, 0, 2);
}

#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
#define EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)

/* Runs `block` for each part of a thread's panels and each block of rows, with at, part, row, and rows as a constant,
 * so that each sum has its register. */
#define EACH_BLOCK(weights, panel_steps, block) \
    int64_t blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS; \
    _Pragma("omp parallel for schedule(static)") \
    for (int64_t at = 0; at < outputs; at += PANEL) \
        for (int64_t first = 0; first < panel_steps; first += STEPS) \
            for (int64_t b = 0; b < blocks; b++) { \
                int64_t row = count * b / blocks; \
                Part part = part_of(weights + at * inputs, panel_steps, first, b, blocks); \
                switch (count * (b + 1) / blocks - row) { \
                case 1: block(1); break; \
                case 2: block(2); break; \
                case 3: block(3); break; \
                case 4: block(4); break; \
                case 5: block(5); break; \
                default: block(BLOCK_ROWS); \
                } \
            }

static inline __attribute__((always_inline)) void float_block(
    const int rows, const float *input, int64_t inputs, Part part, const float *bias, float *output, int64_t outputs) {
    vec sums[BLOCK_ROWS][VECTORS];
    if (!part.is_first)
        EACH_ROW EACH_VECTOR sums[r][v] = load(output + r * outputs + v * LANES);
    else if (bias)
        EACH_ROW EACH_VECTOR sums[r][v] = load(bias + v * LANES);
    else
        EACH_ROW EACH_VECTOR sums[r][v] = (vec){};
    for (int64_t k = 0; k < part.steps; k++) {
        vec weights[VECTORS];
        EACH_VECTOR weights[v] = load((const float *)(part.weights + k * LINES * LINE + v * LINE));
        fetch(part, k);
        EACH_ROW EACH_VECTOR sums[r][v] += weights[v] * input[r * inputs + k];
    }
    EACH_ROW EACH_VECTOR store(output + r * outputs + v * LANES, sums[r][v]);
}

/* input [count, inputs] · weightsᵀ + bias = output [count, outputs]; bias may be 0. */
void multiply_float(
    const float *input, int64_t count, int64_t inputs, const float *weights, int64_t outputs, const float *bias,
    float *output) {
#define BLOCK(rows) \
    float_block( \
        rows, input + row * inputs + first, inputs, part, bias ? bias + at : 0, output + row * outputs + at, outputs)
    EACH_BLOCK(weights, inputs, BLOCK)
#undef BLOCK
}

#ifdef __AVX512VNNI__
/* sums + products of each lane's four unsigned bytes with four signed ones; the intrinsic has a huge header. */
static inline ints add_products(ints sums, ints bytes, ints weights) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(weights));
    return sums;
}

static inline ints load_ints(const void *at) {
    ints value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Round a row to unsigned bytes around 128; returns its largest magnitude, which becomes 127 steps. A row of zeros
 * rounds to anything, and is then multiplied by its largest magnitude, 0. */
static float round_row(const float *row, int64_t inputs, uint8_t *rounded) {
    ints most = {}; /* a float's bits without the sign sort like its magnitude, with NaN above all */
    for (int64_t k = 0; k < inputs; k += LANES) {
        ints size = (ints)load(row + k) & 0x7fffffff, larger = size > most;
        most = (size & larger) | (most & ~larger);
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    float steps = 127.0f / largest;
    for (int64_t k = 0; k < inputs; k += LANES) {
        vec shifted = load(row + k) * steps + 128.5f; /* half a step: the conversion truncates */
        *(bytes *)(rounded + k) = __builtin_convertvector(__builtin_convertvector(shifted, ints), bytes);
    }
    return largest;
}

/* Until the panel's last part, the output's memory holds the integers. */
static inline __attribute__((always_inline)) void int8_block(
    const int rows, const uint8_t *rounded, const float *largest, int64_t inputs, Part part, const int32_t *offsets,
    const float *scales, const float *bias, float *output, int64_t outputs) {
    ints sums[BLOCK_ROWS][VECTORS];
    if (part.is_first)
        EACH_ROW EACH_VECTOR sums[r][v] = load_ints(offsets + v * LANES);
    else
        EACH_ROW EACH_VECTOR sums[r][v] = load_ints(output + r * outputs + v * LANES);
    for (int64_t k = 0; k < part.steps; k++) {
        ints weights[VECTORS];
        EACH_VECTOR weights[v] = load_ints(part.weights + k * LINES * LINE + v * LINE);
        fetch(part, k);
        EACH_ROW {
            int32_t four;
            memcpy(&four, rounded + r * inputs + 4 * k, sizeof four);
            EACH_VECTOR sums[r][v] = add_products(sums[r][v], (ints){} + four, weights[v]);
        }
    }
    if (!part.is_last) {
        EACH_ROW EACH_VECTOR store(output + r * outputs + v * LANES, (vec)sums[r][v]);
        return;
    }
    EACH_ROW EACH_VECTOR {
        vec product = __builtin_convertvector(sums[r][v], vec) * load(scales + v * LANES) * largest[r];
        /* Prevents fusing the addition into one operation, which would depend on the number of rows. */
        __asm__("" : "+v"(product));
        store(output + r * outputs + v * LANES, bias ? product + load(bias + v * LANES) : product);
    }
}

/* As multiply_float, in integers. offsets [outputs] compensate the rows' bias of 128: -128 times the sum of an output's
 * weights. scales [outputs]: the value of an output's integer step for a row whose largest magnitude is 1.
 * rounded [count, inputs] and largest [count] are work space. */
void multiply_int8(
    const float *input, int64_t count, int64_t inputs, const int8_t *weights, int64_t outputs, const int32_t *offsets,
    const float *scales, const float *bias, uint8_t *rounded, float *largest, float *output) {
#pragma omp parallel for schedule(static) if (count > BLOCK_ROWS) /* for fewer rows, waking threads takes longer */
    for (int64_t row = 0; row < count; row++)
        largest[row] = round_row(input + row * inputs, inputs, rounded + row * inputs);
#define BLOCK(rows) \
    int8_block( \
        rows, rounded + row * inputs + 4 * first, largest + row, inputs, part, offsets + at, scales + at, \
        bias ? bias + at : 0, output + row * outputs + at, outputs)
    EACH_BLOCK(weights, inputs / 4, BLOCK)
#undef BLOCK
}
#endif
