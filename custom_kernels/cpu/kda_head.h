/* One head of a KDA layer between its input projections and its output projection, token by token: model
 * specification 2.3. Included by kernels.c. A token goes through the state twice, decayed in passing: once to read with
 * k, once to add the correction, to store and to read with q. */

INLINE float exp_one(float y) { /* y in [-87, 0] */
    float power, r = reduce_exp(y, &power);
    return power * expm1_small(r) + power;
}

/* SiLU of the causal convolution of stream s at token t, for the channels of one head from c on. */
INLINE void short_conv(const k3_kda *job, int s, int64_t t, int64_t c, const float *taps, float *out) {
    const int64_t P = job->heads * job->width, before = job->taps - 1;
    for (int64_t j = 0; j < job->width; j++) out[j] = 0;
    for (int64_t tap = 0; tap <= before; tap++) {
        const int64_t from = t - before + tap; /* the sample that this tap multiplies */
        const float *sample = from < 0 ? job->windows + (s * before + before + from) * P : job->x[s] + from * P;
        for (int64_t j = 0; j < job->width; j++) out[j] += taps[tap * K3_KDA_WIDTH + j] * sample[c + j];
    }
    for (int64_t j = 0; j < job->width; j++) out[j] *= sigmoid_one(out[j]);
}

INLINE float sum_of_squares(const float *x, int64_t count) {
    vf sum = v_zero();
    for (int64_t j = 0; j < count; j += VL) sum = v_fma(v_load(x + j), v_load(x + j), sum);
    return v_sum(sum);
}

/* error[j] = beta (v[j] - sum_i k[i] alpha[i] old[i, j]) for N vectors of columns j from j0 on. */
INLINE void read_error(const int N, int64_t width, const float *old, const float *decayed_k, const float *v, float beta,
                       int64_t j0, float *error) {
    vf sum[8];
    TIMES(n, N, sum[n] = v_zero(););
    for (int64_t i = 0; i < width; i++) {
        const vf k = v_all(decayed_k[i]);
        TIMES(n, N, sum[n] = v_fma(k, v_load(old + i * width + j0 + n * VL), sum[n]););
    }
    TIMES(n, N, v_store(error + j0 + n * VL, sum[n]););
    for (int64_t j = j0; j < j0 + N * VL; j++) error[j] = beta * (v[j] - error[j]);
}

/* new[i, j] = alpha[i] old[i, j] + k[i] error[j] and out[j] = sum_i q[i] new[i, j], for the same columns. */
INLINE void add_error(const int N, int64_t width, const float *old, const float *alpha, const float *k, const float *q,
                      const float *error, int64_t j0, float *new, float *out) {
    vf sum[8], e[8];
    TIMES(n, N, sum[n] = v_zero(); e[n] = v_load(error + j0 + n * VL););
    for (int64_t i = 0; i < width; i++) {
        const vf a = v_all(alpha[i]), ki = v_all(k[i]), qi = v_all(q[i]);
        TIMES(n, N, {
            const int64_t at = i * width + j0 + n * VL;
            const vf value = v_fma(ki, e[n], v_fma(a, v_load(old + at), v_zero()));
            v_store(new + at, value);
            sum[n] = v_fma(qi, value, sum[n]);
        });
    }
    TIMES(n, N, v_store(out + j0 + n * VL, sum[n]););
}

static void kda_head(const k3_kda *job, int64_t head) {
    enum { D = K3_KDA_WIDTH, WIDE = REGISTERS >= 32 ? 8 : 4 };
    const int64_t width = job->width, c = head * width, P = job->heads * width, before = job->taps - 1;
    float taps[3][K3_KDA_TAPS * D], stream[3][D], alpha[D], decayed_k[D], error[D], out[D];
    const float *state = job->state + head * width * width, rate = expf(job->A_log[head]);
    float *new = job->new_state + head * width * width;
    for (int s = 0; s < 3; s++)
        for (int64_t tap = 0; tap <= before; tap++)
            for (int64_t j = 0; j < width; j++) taps[s][tap * D + j] = job->tap[(s * P + c + j) * job->taps + tap];
    for (int64_t t = 0; t < job->tokens; t++, state = new) {
        for (int s = 0; s < 3; s++) short_conv(job, s, t, c, taps[s], stream[s]);
        float *q = stream[0], *k = stream[1], *v = stream[2];
        const float q_unit = 1.0f / sqrtf((sum_of_squares(q, width) + (float)job->l2_eps) * (float)width);
        const float k_unit = 1.0f / sqrtf(sum_of_squares(k, width) + (float)job->l2_eps);
        for (int64_t j = 0; j < width; j++) {
            const float g = (float)job->lower_bound * sigmoid_one(rate * (job->z[t * P + c + j] + job->dt_bias[c + j]));
            alpha[j] = exp_one(clamp_exponent(g));
            q[j] *= q_unit;
            k[j] *= k_unit;
            decayed_k[j] = alpha[j] * k[j];
        }
        const float beta = sigmoid_one(job->b[t * job->heads + head]);
        int64_t j0 = 0;
        for (; j0 + WIDE * VL <= width; j0 += WIDE * VL) {
            read_error(WIDE, width, state, decayed_k, v, beta, j0, error);
            add_error(WIDE, width, state, alpha, k, q, error, j0, new, out);
        }
        for (; j0 < width; j0 += VL) {
            read_error(1, width, state, decayed_k, v, beta, j0, error);
            add_error(1, width, state, alpha, k, q, error, j0, new, out);
        }
        const float norm = 1.0f / sqrtf(sum_of_squares(out, width) / (float)width + (float)job->eps);
        for (int64_t j = 0; j < width; j++)
            job->y[t * P + c + j] = out[j] * norm * job->o_norm[j] * sigmoid_one(job->gate[t * P + c + j]);
    }
    for (int s = 0; s < 3; s++)
        for (int64_t row = 0; row < before; row++) {
            const int64_t from = job->tokens - before + row;
            const float *sample = from < 0 ? job->windows + (s * before + before + from) * P : job->x[s] + from * P;
            memcpy(job->new_windows + (s * before + row) * P + c, sample + c, (size_t)width * sizeof(float));
        }
}
