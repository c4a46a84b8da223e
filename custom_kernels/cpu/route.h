/* The experts of one token. Included by kernels.c, after situ.h. */

static void route(const k3_route *job, int64_t token) {
    const int64_t experts = job->experts, chosen = job->chosen;
    const float *logits = job->logits + token * experts;
    int64_t *ids = job->ids + token * chosen;
    float score[K3_ROUTED], biased[K3_ROUTED], *weights = job->weights + token * chosen, total = 0;
    for (int64_t e = 0; e < experts; e++) {
        score[e] = sigmoid_one(logits[e]);
        biased[e] = score[e] + job->bias[e];
        if (!(biased[e] > -FLT_MAX)) biased[e] = -FLT_MAX; /* a NaN comes last */
    }
    for (int64_t i = 0; i < chosen; i++) {
        int64_t best = 0;
        for (int64_t e = 1; e < experts; e++)
            if (biased[e] > biased[best]) best = e;
        ids[i] = best;
        weights[i] = score[best];
        total += score[best];
        biased[best] = -INFINITY; /* below all that are left */
    }
    for (int64_t i = 0; i < chosen; i++) weights[i] = weights[i] / (total + 1e-20f) * (float)job->scaling;
}
