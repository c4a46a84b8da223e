/* SiTU, model specification 2.6.1, as straight-line C that compilers turn into vectors. Included by kernels.c. */

/* exp(r) - 1 for |r| <= ln(2)/2 by its Taylor polynomial: the first term left out is below 2e-8 of the sum. */
INLINE float expm1_small(float r) {
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    return p * r * r + r;
}

/* y = n ln 2 + r for y in [-87, 0]: sets 2^n, returns r. A NaN passes through r. */
INLINE float reduce_exp(float y, float *power) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    float shifted = y * 1.44269504f + round, n = shifted - round;
    *power = float_of_bits((bits_of_float(shifted) - bits_of_float(round) + 127u) << 23);
    return (y - n * 0.693145752f) - n * 1.42860682e-6f; /* ln 2 in two parts: n times the first is exact */
}

INLINE float clamp_exponent(float y) { return y < -87.0f ? -87.0f : y; }

INLINE float sigmoid_one(float a) {
    float power, magnitude = a < 0 ? -a : a;
    float r = reduce_exp(clamp_exponent(-magnitude), &power);
    float e = power * expm1_small(r) + power; /* exp(-|a|) */
    return (a < 0 ? e : 1.0f) / (1.0f + e);
}

INLINE float tanh_one(float y) {
    float power, magnitude = y < 0 ? -y : y;
    float r = reduce_exp(clamp_exponent(-2.0f * magnitude), &power);
    float minus = power * expm1_small(r) + (power - 1.0f); /* exp(-2|y|) - 1, accurate near 0 */
    float t = -minus / (2.0f + minus);
    return y < 0 ? -t : t;
}

INLINE float situ_one(float gate, float up, float beta, float linear_beta) {
    float bounded = beta * tanh_one(gate / beta) * sigmoid_one(gate);
    return bounded * (linear_beta * tanh_one(up / linear_beta));
}
