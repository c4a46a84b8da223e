/* Latent attention of a token in the absorbed form: queries into the space of the cache, chunks of the cache with all heads,
 * and what the chunks have given together, back from that space. Included by kernels.c, after kda_head.h. */

enum { HEADS = REGISTERS >= 32 ? 8 : 4 }; /* at a time: a row is loaded once for all of them */
enum { ATTENTION_ROWS = 16 };              /* of the cache at a time, for all heads: they stay in the caches nearby */

/* out [cols] += x[0..R-1] times as many rows of W. */
INLINE void add_rows(const int R, const float *x, const float *w, int64_t cols, float *out) {
    for (int64_t j = 0; j < cols; j += VL) {
        vf sum = v_load(out + j);
        TIMES(r, R, sum = v_fma(v_all(x[r]), v_load(w + r * cols + j), sum););
        v_store(out + j, sum);
    }
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
    vf sum[2][HEADS];
    TIMES(r, R, TIMES(g, G, sum[r][g] = v_zero();););
    for (int64_t i = 0; i < width; i += VL) {
        vf row[2];
        TIMES(r, R, row[r] = v_load(rows + r * width + i););
        TIMES(g, G, {
            const vf own = v_load(q + g * width + i);
            TIMES(r, R, sum[r][g] = v_fma(row[r], own, sum[r][g]););
        });
    }
    TIMES(r, R, TIMES(g, G, scores[g * ATTENTION_ROWS + r] = v_sum(sum[r][g]);););
}

/* N vectors of columns: mixed[g] = mixed[g] * kept[g] + weights[g] x the first `count` rows. */
INLINE void mix_rows(const int G, const int N, const float *rows, int64_t count, int64_t width, const float *weights,
                     const float *kept, float *mixed, int64_t rank) {
    vf sum[2][HEADS];
    TIMES(n, N, TIMES(g, G, sum[n][g] = v_fma(v_all(kept[g]), v_load(mixed + g * rank + n * VL), v_zero());););
    for (int64_t s = 0; s < count; s++) {
        vf row[2];
        TIMES(n, N, row[n] = v_load(rows + s * width + n * VL););
        TIMES(g, G, {
            const vf weight = v_all(weights[g * ATTENTION_ROWS + s]);
            TIMES(n, N, sum[n][g] = v_fma(weight, row[n], sum[n][g]););
        });
    }
    TIMES(n, N, TIMES(g, G, v_store(mixed + g * rank + n * VL, sum[n][g]);););
}

/* The next `count` rows for G heads, whose largest score may rise. */
INLINE void attend_rows(const int G, const float *rows, int64_t count, int64_t width, int64_t rank, const float *q,
                        float *mixed, float *largest, float *total) {
    float weights[HEADS * ATTENTION_ROWS], kept[HEADS];
    int64_t s = 0, i = 0;
    for (; s + 2 <= count; s += 2) scores_of(G, 2, rows + s * width, q, width, weights + s);
    if (s < count) scores_of(G, 1, rows + s * width, q, width, weights + s);
    for (int g = 0; g < G; g++) {
        float *own = weights + g * ATTENTION_ROWS, before = largest[g], new = before;
        for (int64_t r = count; r < ATTENTION_ROWS; r++) own[r] = -INFINITY;
        for (int r = 0; r < ATTENTION_ROWS; r++) new = own[r] > new ? own[r] : new;
        for (int r = 0; r < ATTENTION_ROWS; r++) own[r] = exp_one(clamp_exponent(own[r] - new));
        vf sum = v_load(own);
        for (int r = VL; r < ATTENTION_ROWS; r += VL) sum = v_add(sum, v_load(own + r));
        kept[g] = exp_one(clamp_exponent(before - new));
        total[g] = total[g] * kept[g] + v_sum(sum);
        largest[g] = new;
    }
    for (; i + 2 * VL <= rank; i += 2 * VL) mix_rows(G, 2, rows + i, count, width, weights, kept, mixed + i, rank);
    for (; i < rank; i += VL) mix_rows(G, 1, rows + i, count, width, weights, kept, mixed + i, rank);
}

/* out [cols] = x [rows] W, and out [rows] = W x. Both read W from end to end. */
INLINE void map_in(const float *x, int64_t rows, const float *w, int64_t cols, float *out) {
    int64_t i = 0;
    memset(out, 0, (size_t)cols * sizeof(float));
    for (; i + 4 <= rows; i += 4) add_rows(4, x + i, w + i * cols, cols, out);
    for (; i < rows; i++) add_rows(1, x + i, w + i * cols, cols, out);
}
INLINE void map_out(const float *w, int64_t rows, const float *x, int64_t cols, float *out) {
    enum { WIDE = REGISTERS >= 32 ? 8 : 4 };
    int64_t i = 0;
    for (; i + WIDE <= rows; i += WIDE) dot_rows(WIDE, w + i * cols, x, cols, out + i);
    for (; i < rows; i++) dot_rows(1, w + i * cols, x, cols, out + i);
}

static void attention_query(const k3_attention_token *t, int64_t head) {
    const k3_attention *job = t->job;
    const int64_t rank = job->rank, width = rank + job->ext;
    const float *own = job->q + (t->token * job->heads + head) * (job->nope + job->ext);
    float *q = t->q + head * width;
    map_in(own, job->nope, job->maps + head * (job->nope + job->value) * rank, rank, q);
    memcpy(q + rank, own + job->nope, (size_t)job->ext * sizeof(float));
    for (int64_t i = 0; i < width; i++) q[i] *= (float)job->scale;
}

static void attention_chunk(const k3_attention_token *t, int64_t chunk) {
    const int64_t heads = t->job->heads, rank = t->job->rank, width = rank + t->job->ext;
    const int64_t first = chunk * t->chunk, last = first + t->chunk < t->seen ? first + t->chunk : t->seen;
    float *mixed = t->mixed + chunk * heads * rank, *largest = t->largest + chunk * heads, *total = t->total + chunk * heads;
    memset(mixed, 0, (size_t)(heads * rank) * sizeof(float));
    for (int64_t h = 0; h < heads; h++) {
        largest[h] = -INFINITY;
        total[h] = 0;
    }
    for (int64_t s = first; s < last; s += ATTENTION_ROWS) {
        const float *rows = t->job->rows + s * width;
        const int64_t count = last - s < ATTENTION_ROWS ? last - s : ATTENTION_ROWS;
        int64_t h = 0;
        for (; h + HEADS <= heads; h += HEADS)
            attend_rows(HEADS, rows, count, width, rank, t->q + h * width, mixed + h * rank, largest + h, total + h);
        for (; h < heads; h++)
            attend_rows(1, rows, count, width, rank, t->q + h * width, mixed + h * rank, largest + h, total + h);
    }
}

static void attention_result(const k3_attention_token *t, int64_t head) {
    const k3_attention *job = t->job;
    const int64_t heads = job->heads, rank = job->rank;
    float mixed[K3_ATTENTION_WIDTH], largest = -INFINITY, total = 0;
    for (int64_t c = 0; c < t->chunks; c++) {
        const float own = t->largest[c * heads + head];
        largest = own > largest ? own : largest;
    }
    memset(mixed, 0, sizeof mixed);
    for (int64_t c = 0; c < t->chunks; c++) {
        const float weight = exp_one(clamp_exponent(t->largest[c * heads + head] - largest));
        const float *part = t->mixed + (c * heads + head) * rank;
        total += weight * t->total[c * heads + head];
        for (int64_t i = 0; i < rank; i += VL)
            v_store(mixed + i, v_fma(v_all(weight), v_load(part + i), v_load(mixed + i)));
    }
    float *out = job->out + (t->token * heads + head) * job->value;
    map_out(job->maps + (head * (job->nope + job->value) + job->nope) * rank, job->value, mixed, rank, out);
    for (int64_t i = 0; i < job->value; i++) out[i] /= total;
}

/* out = a sigmoid(b) */
static void gate(const k3_pairs *job) {
    for (int64_t i = 0; i < job->count; i++) job->out[i] = job->a[i] * sigmoid_one(job->b[i]);
}
