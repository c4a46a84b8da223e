/* Latent attention of a token in the absorbed form, for a few heads at a time, so that a row of the cache is read once for
 * all of them. Included by kernels.c, after kda_head.h. */

enum { ATTENTION_ROWS = 32 }; /* of the cache at a time: they stay in the second cache between scores and values */

/* out [cols] = x [rows] W for N vectors of columns. */
INLINE void add_rows(const int N, const float *x, int64_t rows, const float *w, int64_t cols, float *out) {
    vf sum[8];
    TIMES(n, N, sum[n] = v_zero(););
    for (int64_t i = 0; i < rows; i++) {
        const vf xi = v_all(x[i]);
        TIMES(n, N, sum[n] = v_fma(xi, v_load(w + i * cols + n * VL), sum[n]););
    }
    TIMES(n, N, v_store(out + n * VL, sum[n]););
}

/* out [R] = W x [cols], the first R rows of W. */
INLINE void dot_rows(const int R, const float *w, const float *x, int64_t cols, float *out) {
    vf sum[8];
    TIMES(r, R, sum[r] = v_zero(););
    for (int64_t j = 0; j < cols; j += VL) {
        const vf xj = v_load(x + j);
        TIMES(r, R, sum[r] = v_fma(v_load(w + r * cols + j), xj, sum[r]););
    }
    TIMES(r, R, out[r] = v_sum(sum[r]););
}

/* R rows times the queries of G heads: scores[g * ATTENTION_ROWS + r]. */
INLINE void scores_of(const int G, const int R, const float *rows, const float *q, int64_t width, float *scores) {
    vf sum[2][K3_ATTENTION_HEADS];
    TIMES(r, R, TIMES(g, G, sum[r][g] = v_zero();););
    for (int64_t i = 0; i < width; i += VL)
        TIMES(r, R, {
            const vf row = v_load(rows + r * width + i);
            TIMES(g, G, sum[r][g] = v_fma(row, v_load(q + g * width + i), sum[r][g]););
        });
    TIMES(r, R, TIMES(g, G, scores[g * ATTENTION_ROWS + r] = v_sum(sum[r][g]);););
}

/* N vectors of columns: mixed[g] = mixed[g] * kept[g] + weights[g] x the first `count` rows. */
INLINE void mix_rows(const int G, const int N, const float *rows, int64_t count, int64_t width, const float *weights,
                     const float *kept, float *mixed) {
    vf sum[2][K3_ATTENTION_HEADS];
    TIMES(n, N, TIMES(g, G, {
              sum[n][g] = v_fma(v_all(kept[g]), v_load(mixed + g * K3_ATTENTION_WIDTH + n * VL), v_zero());
          }););
    for (int64_t s = 0; s < count; s++)
        TIMES(n, N, {
            const vf row = v_load(rows + s * width + n * VL);
            TIMES(g, G, sum[n][g] = v_fma(v_all(weights[g * ATTENTION_ROWS + s]), row, sum[n][g]););
        });
    TIMES(n, N, TIMES(g, G, v_store(mixed + g * K3_ATTENTION_WIDTH + n * VL, sum[n][g]);););
}

INLINE void map_in(const float *x, int64_t rows, const float *w, int64_t cols, float *out) {
    enum { WIDE = REGISTERS >= 32 ? 8 : 4 };
    int64_t i = 0;
    for (; i + WIDE * VL <= cols; i += WIDE * VL) add_rows(WIDE, x, rows, w + i, cols, out + i);
    for (; i < cols; i += VL) add_rows(1, x, rows, w + i, cols, out + i);
}
INLINE void map_out(const float *w, int64_t rows, const float *x, int64_t cols, float *out) {
    enum { WIDE = REGISTERS >= 32 ? 8 : 4 };
    int64_t i = 0;
    for (; i + WIDE <= rows; i += WIDE) dot_rows(WIDE, w + i * cols, x, cols, out + i);
    for (; i < rows; i++) dot_rows(1, w + i * cols, x, cols, out + i);
}

/* Heads first..first + G - 1 of a token, with a running maximum over the rows. */
INLINE void attend(const int G, const k3_attention *job, int64_t token, int64_t first) {
    const int64_t rank = job->rank, width = rank + job->ext, seen = job->cached - job->tokens + token + 1;
    float q[K3_ATTENTION_HEADS * K3_ATTENTION_WIDTH], mixed[K3_ATTENTION_HEADS * K3_ATTENTION_WIDTH];
    float weights[K3_ATTENTION_HEADS * ATTENTION_ROWS], largest[K3_ATTENTION_HEADS], total[K3_ATTENTION_HEADS];
    for (int g = 0; g < G; g++) {
        const float *own = job->q + (token * job->heads + first + g) * (job->nope + job->ext);
        map_in(own, job->nope, job->maps + (first + g) * (job->nope + job->value) * rank, rank, q + g * width);
        memcpy(q + g * width + rank, own + job->nope, (size_t)job->ext * sizeof(float));
        for (int64_t i = 0; i < width; i++) q[g * width + i] *= (float)job->scale;
        memset(mixed + g * K3_ATTENTION_WIDTH, 0, (size_t)rank * sizeof(float));
        largest[g] = -INFINITY;
        total[g] = 0;
    }
    for (int64_t s0 = 0; s0 < seen; s0 += ATTENTION_ROWS) {
        const float *rows = job->rows + s0 * width;
        const int64_t count = seen - s0 < ATTENTION_ROWS ? seen - s0 : ATTENTION_ROWS;
        float kept[K3_ATTENTION_HEADS];
        int64_t s = 0;
        for (; s + 2 <= count; s += 2) scores_of(G, 2, rows + s * width, q, width, weights + s);
        if (s < count) scores_of(G, 1, rows + s * width, q, width, weights + s);
        for (int g = 0; g < G; g++) {
            float *own = weights + g * ATTENTION_ROWS, before = largest[g];
            for (int64_t i = 0; i < count; i++) largest[g] = own[i] > largest[g] ? own[i] : largest[g];
            kept[g] = exp_one(clamp_exponent(before - largest[g]));
            total[g] *= kept[g];
            for (int64_t i = 0; i < count; i++) total[g] += own[i] = exp_one(clamp_exponent(own[i] - largest[g]));
        }
        int64_t i = 0;
        for (; i + 2 * VL <= rank; i += 2 * VL) mix_rows(G, 2, rows + i, count, width, weights, kept, mixed + i);
        for (; i < rank; i += VL) mix_rows(G, 1, rows + i, count, width, weights, kept, mixed + i);
    }
    for (int g = 0; g < G; g++) {
        const float *map = job->maps + ((first + g) * (job->nope + job->value) + job->nope) * rank;
        float *out = job->out + (token * job->heads + first + g) * job->value;
        map_out(map, job->value, mixed + g * K3_ATTENTION_WIDTH, rank, out);
        for (int64_t i = 0; i < job->value; i++) out[i] /= total[g];
    }
}

static void attention(const k3_attention *job, int64_t item) {
    const int64_t groups = (job->heads + K3_ATTENTION_HEADS - 1) / K3_ATTENTION_HEADS, token = item / groups;
    int64_t first = item % groups * K3_ATTENTION_HEADS;
    if (first + K3_ATTENTION_HEADS <= job->heads) {
        attend(K3_ATTENTION_HEADS, job, token, first);
        return;
    }
    for (; first < job->heads; first++) attend(1, job, token, first);
}

/* out = a sigmoid(b) */
static void gate(const k3_pairs *job) {
    for (int64_t i = 0; i < job->count; i++) job->out[i] = job->a[i] * sigmoid_one(job->b[i]);
}
