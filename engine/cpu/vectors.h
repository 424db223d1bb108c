/* Vectors of floats, for the C files of this folder. The types are GCC's; with narrower registers, a vector takes
 * several of them. */

#ifndef SPILLWAY_VECTORS_H
#define SPILLWAY_VECTORS_H

#include <stdint.h>
#include <string.h>

enum { LANES = 16 }; /* floats per vector */

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));

static inline vec load(const float *at) {
    vec value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void store(float *at, vec value) { memcpy(at, &value, sizeof value); }

/* For each lane: a if the mask is all ones, else b. */
static inline vec choose(ints mask, vec a, vec b) { return (vec)(((ints)a & mask) | ((ints)b & ~mask)); }

static inline float sum(vec v) {
    v += __builtin_shuffle(v, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (ints){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return v[0] + v[1];
}

/* e^x for x <= 0: a power of two times a polynomial (Cephes' expf). */
static inline vec exponential(vec x) {
    const float least = -87.0f; /* smaller values would underflow the exponent */
    x = choose(x < least, (vec){} + least, x);
    vec scaled = x * 1.44269504f - 0.5f;
    ints whole = __builtin_convertvector(scaled, ints); /* truncates, so that the rest is within +-0.5 */
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

#endif
