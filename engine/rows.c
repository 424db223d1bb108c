/* What a layer does with its rows beside products and attention: each in one pass instead of torch's four to eight. */

#include <math.h>

#include "vectors.h"

enum { ALONE = 8192 }; /* floats that one thread is done with before others are awake */

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
