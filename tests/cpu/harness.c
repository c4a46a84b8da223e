/* Runs cases from a file through the library's entry points, every buffer of exactly its size: for sanitizers,
 * valgrind and emulators. Usage: harness ISA CASES RESULTS. The format of CASES is in test_cpu_proofs.py. */
#include "k3cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const k3_isa *k3_isa_named(const char *name);
int k3_matmul(const k3_isa *isa, int threads, const k3_matrix *const *m, int64_t count, const float *x, int64_t x_stride,
              int64_t tokens, float *const *out);
int k3_experts_mix(const k3_isa *isa, int threads, const k3_matrix *matrices, int64_t experts, const int64_t *start,
                   const int64_t *token, const int64_t *row, const float *weight, const float *x, int64_t x_stride,
                   int64_t tokens, float beta, float linear_beta, float *out, int64_t out_stride);

void k3_kda_step(const k3_isa *isa, int threads, const k3_kda *job);
void k3_heads_product(const k3_isa *isa, int threads, const k3_heads *job);

static FILE *in, *out;

static int64_t number(void) {
    int64_t value = 0;
    if (fread(&value, sizeof value, 1, in) != 1) exit(3);
    return value;
}

/* The next array, `off` bytes off malloc's alignment, ending where its allocation ends. */
static void *array(int64_t bytes, int off) {
    uint8_t *room = malloc((size_t)(bytes + off));
    if (bytes && fread(room + off, (size_t)bytes, 1, in) != 1) exit(3);
    return room + off;
}

static k3_matrix matrix(int off) {
    k3_matrix m;
    memset(&m, 0, sizeof m);
    m.format = (int32_t)number();
    m.group = (int32_t)number();
    m.scale_type = (int32_t)number();
    m.rows = number();
    m.cols = number();
    m.row_bytes = number();
    m.scale_bytes = number();
    m.weight = array(m.rows * m.row_bytes, off);
    m.scale = array(m.rows * m.scale_bytes, off);
    m.bias = array(m.format == K3_Q4 || m.format == K3_Q8 ? m.rows * m.scale_bytes : 0, off);
    return m;
}

static float *floats(int64_t count) { return array(4 * count, 0); }
static float *room(int64_t count) { return malloc((size_t)count * sizeof(float)); }
static void write(const float *values, int64_t count) { fwrite(values, sizeof *values, (size_t)count, out); }

static void kda(const k3_isa *isa, int threads, int64_t tokens) {
    int64_t heads = number(), width = number(), taps = number(), P = heads * width, rows = 3 * (taps - 1);
    k3_kda job = {.tokens = tokens, .heads = heads, .width = width, .taps = taps,
                  .lower_bound = -5.0f, .eps = 1e-5f, .l2_eps = 1e-6f};
    for (int i = 0; i < 3; i++) job.x[i] = floats(tokens * P);
    job.z = floats(tokens * P);
    job.b = floats(tokens * heads);
    job.gate = floats(tokens * P);
    job.windows = floats(rows * P);
    job.state = floats(P * width);
    job.tap = floats(3 * P * taps);
    job.A_log = floats(heads);
    job.dt_bias = floats(P);
    job.o_norm = floats(width);
    job.y = room(tokens * P);
    job.new_windows = room(rows * P);
    job.new_state = room(P * width);
    k3_kda_step(isa, threads, &job);
    write(job.y, tokens * P);
    write(job.new_windows, rows * P);
    write(job.new_state, P * width);
}

static void per_head(const k3_isa *isa, int threads, int64_t tokens) {
    int64_t heads = number(), rows = number(), cols = number(), transposed = number();
    int64_t from = transposed ? cols : rows, to = transposed ? rows : cols;
    float *result = room(tokens * heads * to);
    k3_heads job = {.heads = heads, .tokens = tokens, .rows = rows, .cols = cols, .transposed = transposed,
                    .w_stride = rows * cols, .x_head = from, .x_token = heads * from,
                    .out_head = to, .out_token = heads * to, .out = result};
    job.w = floats(heads * rows * cols);
    job.x = floats(tokens * heads * from);
    k3_heads_product(isa, threads, &job);
    write(result, tokens * heads * to);
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    const k3_isa *isa = k3_isa_named(arguments[1]);
    if (!isa) return 4;
    in = fopen(arguments[2], "rb");
    out = fopen(arguments[3], "wb");
    for (int64_t cases = number(); cases > 0; cases--) {
        int64_t threads = number(), off = number(), experts = number(), tokens = number();
        if (experts < 0) {
            (experts == -1 ? kda : per_head)(isa, (int)threads, tokens);
            continue;
        }
        k3_matrix *m = malloc((size_t)(experts ? 3 * experts : 1) * sizeof *m);
        for (int64_t i = 0; i < (experts ? 3 * experts : 1); i++) m[i] = matrix((int)off);
        int64_t rows = experts ? m[1].rows : m[0].rows;
        float *x = array(tokens * m[0].cols * 4, 0), *result = malloc((size_t)(tokens * rows) * sizeof *result);
        if (experts) {
            int64_t *start = array((experts + 1) * 8, 0), *token = array(start[experts] * 8, 0);
            float *weight = array(start[experts] * 4, 0);
            memset(result, 0, (size_t)(tokens * rows) * sizeof *result);
            if (k3_experts_mix(isa, (int)threads, m, experts, start, token, token, weight, x, m[0].cols, tokens, 4.0f,
                               25.0f, result, rows))
                return 5;
        } else {
            const k3_matrix *one = m;
            if (k3_matmul(isa, (int)threads, &one, 1, x, m[0].cols, tokens, &result)) return 5;
        }
        fwrite(result, sizeof *result, (size_t)(tokens * rows), out);
    }
    return fclose(out) ? 6 : 0;
}
