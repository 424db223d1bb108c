/* A layer's row operations other than products and attention: each in one pass instead of torch's four to eight. */

#include <math.h>

#include "vectors.h"

enum { ALONE = 8192 }; /* floats that one thread finishes before other threads wake up */

/* input / sqrt(mean(input²) + epsilon) · weight, for each row. */
void rms_norm(
    const float *input, int64_t rows, int64_t width, const float *weight, float epsilon, float *output) {
#pragma omp parallel for schedule(static) if (rows * width > ALONE)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = input + row * width;
        float *out = output + row * width;
        vec squares = {};
        for (int64_t i = 0; i < width; i += LANES) squares += load(in + i) * load(in + i);
        float scale = 1.0f / sqrtf(sum(squares) / width + epsilon);
        for (int64_t i = 0; i < width; i += LANES) store(out + i, load(in + i) * scale * load(weight + i));
    }
}

/* silu(gate) · up, where silu(x) = x / (1 + e^-x). gate_row and up_row: floats from one row to the next. */
void silu_multiply(
    const float *gate, int64_t gate_row, const float *up, int64_t up_row, int64_t rows, int64_t width, float *output) {
#pragma omp parallel for schedule(static) if (rows * width > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            vec x = load(gate + row * gate_row + i), power = exponential((vec)((ints)x | INT32_MIN)); /* e^-|x| */
            vec sigmoid = choose(x < 0.0f, power, (vec){} + 1.0f) / (power + 1.0f);
            store(output + row * width + i, x * sigmoid * load(up + row * up_row + i));
        }
}

/* Rotary position embedding of rows [heads, rows, dim], which rotates their halves: output
 * [rows, heads, dim] = x · cos + (minus the second half, first half) · sin. cos, sin: [rows, dim]. Strides are in
 * floats. */
void rotate(
    const float *input, int64_t head_floats, int64_t row_floats, int64_t heads, int64_t rows, int64_t dim,
    const float *cos, const float *sin, float *output) {
#pragma omp parallel for schedule(static) if (rows * heads * dim > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const float *first = input + head * head_floats + row * row_floats, *second = first + dim / 2;
            float *out = output + (row * heads + head) * dim;
            const float *c = cos + row * dim, *s = sin + row * dim;
            for (int64_t i = 0; i < dim / 2; i += LANES) {
                vec a = load(first + i), b = load(second + i);
                store(out + i, a * load(c + i) - b * load(s + i));
                store(out + dim / 2 + i, b * load(c + dim / 2 + i) + a * load(s + dim / 2 + i));
            }
        }
}
