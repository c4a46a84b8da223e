/* Products of each head's vectors with a matrix of its own, as latent attention needs them. Included by kernels.c. */

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

static void head_product(const k3_heads *job, int64_t head) {
    enum { WIDE = REGISTERS >= 32 ? 8 : 4 };
    const int64_t rows = job->rows, cols = job->cols;
    const float *w = job->w + head * job->w_stride;
    for (int64_t t = 0; t < job->tokens; t++) {
        const float *x = job->x + t * job->x_token + head * job->x_head;
        float *out = job->out + t * job->out_token + head * job->out_head;
        int64_t i = 0;
        if (job->transposed) {
            for (; i + WIDE <= rows; i += WIDE) dot_rows(WIDE, w + i * cols, x, cols, out + i);
            for (; i < rows; i++) dot_rows(1, w + i * cols, x, cols, out + i);
        } else {
            for (; i + WIDE * VL <= cols; i += WIDE * VL) add_rows(WIDE, x, rows, w + i, cols, out + i);
            for (; i < cols; i += VL) add_rows(1, x, rows, w + i, cols, out + i);
        }
    }
}
