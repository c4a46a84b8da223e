/* Runs cases from a file through the library's entry points, every buffer of exactly its size: for sanitizers,
 * valgrind and emulators. Usage: harness ISA CASES RESULTS. The format of CASES is in test_cpu_proofs.py. */
#include "k3cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const k3_isa *k3_isa_named(const char *name);
int k3_matmul(const k3_isa *isa, int threads, const k3_matrix *m, const float *x, int64_t x_stride, int64_t tokens,
              float *out, int64_t out_stride);
int k3_experts_mix(const k3_isa *isa, int threads, const k3_matrix *matrices, int64_t experts, const int64_t *start,
                   const int64_t *token, const int64_t *row, const float *weight, const float *x, int64_t x_stride,
                   int64_t tokens, float beta, float linear_beta, float *out, int64_t out_stride);

static FILE *in;

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

int main(int count, char **arguments) {
    if (count != 4) return 2;
    const k3_isa *isa = k3_isa_named(arguments[1]);
    if (!isa) return 4;
    in = fopen(arguments[2], "rb");
    FILE *out = fopen(arguments[3], "wb");
    for (int64_t cases = number(); cases > 0; cases--) {
        int64_t threads = number(), off = number(), experts = number(), tokens = number();
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
        } else if (k3_matmul(isa, (int)threads, m, x, m[0].cols, tokens, result, rows)) {
            return 5;
        }
        fwrite(result, sizeof *result, (size_t)(tokens * rows), out);
    }
    return fclose(out) ? 6 : 0;
}
