/* Runs cases from a file through the library's entry points, every buffer of exactly its size: for sanitizers,
 * valgrind and emulators. Usage: harness ISA CASES RESULTS. The format of CASES is in test_cpu_proofs.py. */
#include "k3cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const k3_isa *k3_isa_named(const char *name);
int k3_sequence(const k3_isa *isa, int threads, const int64_t *words, int64_t count, double *seconds);

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

enum { NUMBER, GIVEN, RESULT }; /* what a field of a job is: itself, or an array of so many bytes */

/* A job of a sequence: its kind and fields. What it has made is written. */
static int run_job(const k3_isa *isa, int threads) {
    int64_t kind = number(), count = number(), *words = malloc((size_t)(count + 2) * sizeof *words);
    void **results = malloc((size_t)count * sizeof *results);
    int64_t *sizes = malloc((size_t)count * sizeof *sizes), made = 0;
    double seconds;
    words[0] = kind;
    words[1] = count;
    for (int64_t i = 0; i < count; i++) {
        int64_t what = number(), value = number();
        if (what == RESULT) {
            results[made] = malloc((size_t)value);
            sizes[made] = value;
            value = (int64_t)(intptr_t)results[made++];
        } else if (what == GIVEN) {
            value = (int64_t)(intptr_t)array(value, 0);
        }
        words[2 + i] = value;
    }
    if (k3_sequence(isa, threads, words, 1, &seconds)) return -1;
    for (int64_t i = 0; i < made; i++) fwrite(results[i], (size_t)sizes[i], 1, out);
    return 0;
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
            if (run_job(isa, (int)threads)) return 5;
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
