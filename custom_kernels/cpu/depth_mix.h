/* The depth mix of one token. Included by kernels.c, after kda_head.h. */

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
        weight[s] = v_sum(dot) / sqrtf(v_sum(square) / (float)width + job->eps);
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
