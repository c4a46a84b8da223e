/* The depth mix of one token, and a norm. Included by kernels.c, after kda_head.h. */

static void depth_mix(const k3_depth_mix *job, int64_t token) {
    const int64_t width = job->width, count = job->count;
    float weight[K3_SOURCES], largest = -INFINITY, total = 0;
    for (int64_t s = 0; s < count; s++) {
        const float *x = job->source[s] + token * width;
        vf dot = v_zero(), square = v_zero();
        for (int64_t i = 0; i < width; i += VL) {
            const vf value = v_load(x + i), direction = v_fma(v_load(job->norm + i), v_load(job->query + i), v_zero());
            dot = v_fma(value, direction, dot);
            square = v_fma(value, value, square);
        }
        weight[s] = v_sum(dot) / sqrtf(v_sum(square) / (float)width + (float)job->eps);
        largest = weight[s] > largest ? weight[s] : largest;
    }
    for (int64_t s = 0; s < count; s++) {
        weight[s] = exp_one(clamp_exponent(weight[s] - largest));
        total += weight[s];
    }
    float *out = job->out + token * width;
    for (int64_t i = 0; i < width; i += VL) {
        vf sum = v_zero();
        for (int64_t s = 0; s < count; s++)
            sum = v_fma(v_all(weight[s] / total), v_load(job->source[s] + token * width + i), sum);
        v_store(out + i, sum);
    }
}

static void norm(const k3_norm *job, int64_t token) {
    const float *x = job->x + token * (job->width + job->rest);
    float *out = job->out + token * (job->width + job->rest);
    vf square = v_zero();
    for (int64_t i = 0; i < job->width; i += VL) square = v_fma(v_load(x + i), v_load(x + i), square);
    const vf factor = v_all(1.0f / sqrtf(v_sum(square) / (float)job->width + (float)job->eps));
    for (int64_t i = 0; i < job->width; i += VL)
        v_store(out + i, v_fma(v_fma(v_load(x + i), factor, v_zero()), v_load(job->weight + i), v_zero()));
    memcpy(out + job->width, x + job->width, (size_t)job->rest * sizeof(float));
}
