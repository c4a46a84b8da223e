/* One token times 4-bit weights, by integers. The activations of 32 columns become integers of 32 bits times a power of
 * two, the step, at most 2^-30 of the largest of them; each is cut into a high and a low part of 16 bits. Sums of
 * products with the codes of a group are then exact, by dot products of two columns in each of 16 lanes, and nothing but
 * the codes has to be decoded. Where steps or scales are so large or small that their product might leave the range of
 * float32, or are not finite, a row is computed as it is for several tokens, by rows_few.
 *
 * Lane l of a block of 128 columns holds columns 8l to 8l+7, so that four lanes share 32 columns. Word w of vector k is
 * column 4w + k: 16-bit words of the weights as they are stored, shifted by k codes. */

#define VNNI __attribute__((target("avx512vnni"))) /* the rest of kernels.c is compiled without these instructions */

typedef struct {
    int16_t high[4][32], low[4][32];       /* x = (65536 high + low) * step */
    int32_t high_start[16], low_start[16]; /* -8 times the sums of a lane: int4 is counted from code 8 */
} fixed_block;

/* A token: blocks, then three numbers for every 32 columns. */
typedef struct {
    fixed_block *block;
    int32_t *exponent; /* of the step, plus FIXED_BIAS; FIXED_NONE where there is no step */
    float *step;       /* NaN where there is none */
    float *sum;        /* of the activations */
} fixed_token;

/* The sum of an MXFP4 scale byte and `exponent` is in 0..FIXED_RANGE-1 for rows that integers compute; FIXED_FIELD more
 * is the exponent field of the float 2^(byte - 128) * step, since integers looked up are twice the codes' values. */
enum { FIXED_RANGE = 128, FIXED_FIELD = 24, FIXED_BIAS = 127 - 128 - FIXED_FIELD, FIXED_NONE = 1 << 20 };
enum { FIXED_GROUPS = ONE_GROUPS + 16 * 4 }; /* of a row at a time: what a vector of scales may reach beyond */

INLINE fixed_token fixed_at(uint8_t *p, int64_t cols) {
    const int64_t blocks = k3_padded(cols) / K3_PAD;
    int32_t *numbers = (int32_t *)(p + blocks * (int64_t)sizeof(fixed_block));
    return (fixed_token){(fixed_block *)p, numbers, (float *)(numbers + 4 * blocks), (float *)(numbers + 8 * blocks)};
}

static int64_t fixed_bytes(int64_t cols) {
    return k3_padded(cols) / K3_PAD * (int64_t)(sizeof(fixed_block) + 3 * 4 * sizeof(float));
}

static void fix(const float *x, int columns, int64_t cols, int64_t group, uint8_t *fixed) {
    static const uint16_t order[32] = {/* word 8k + w: column 4w + k, whose low half is word 2(4w + k) of two vectors */
                                       0, 8,  16, 24, 32, 40, 48, 56, 2, 10, 18, 26, 34, 42, 50, 58,
                                       4, 12, 20, 28, 36, 44, 52, 60, 6, 14, 22, 30, 38, 46, 54, 62};
    const fixed_token token = fixed_at(fixed, cols);
    fixed_block *block = token.block + group / 4;
    const int part = (int)(group % 4);
    const uint32_t there = columns < 32 ? (1u << columns) - 1 : ~0u;
    const vf a = _mm512_maskz_loadu_ps((__mmask16)there, x), b = _mm512_maskz_loadu_ps((__mmask16)(there >> 16), x + 16);
    const vf limit = _mm512_set1_ps(0x1p60f);
    const int finite = (_mm512_cmp_ps_mask(_mm512_abs_ps(a), limit, _CMP_LT_OQ) &
                        _mm512_cmp_ps_mask(_mm512_abs_ps(b), limit, _CMP_LT_OQ)) == 0xFFFF;
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const int good = finite && (largest == 0 || largest >= 0x1p-60f);
    /* 2^e <= largest < 2^(e+1), with a margin for the rounding of the high part */
    const int e = good && largest > 0 ? (int)(bits_of_float(largest * 1.0001f) >> 23) - 127 : 0;

    const vf up = _mm512_set1_ps(float_of_bits((uint32_t)(127 + 30 - e) << 23));
    const __m512i zero = _mm512_setzero_si512(), half = _mm512_set1_epi32(0x8000);
    const __m512i whole_a = good ? _mm512_cvtps_epi32(_mm512_mul_ps(a, up)) : zero;
    const __m512i whole_b = good ? _mm512_cvtps_epi32(_mm512_mul_ps(b, up)) : zero;
    const __m512i at = _mm512_loadu_si512(order), above = _mm512_add_epi16(at, _mm512_set1_epi16(1));
    int16_t words[2][4][8];
    _mm512_storeu_si512(words[0], _mm512_permutex2var_epi16(_mm512_add_epi32(whole_a, half), above,
                                                            _mm512_add_epi32(whole_b, half)));
    _mm512_storeu_si512(words[1], _mm512_permutex2var_epi16(whole_a, at, whole_b));
    __m128i start[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
    for (int k = 0; k < 4; k++) {
        memcpy(block->high[k] + 8 * part, words[0][k], 16);
        memcpy(block->low[k] + 8 * part, words[1][k], 16);
        for (int i = 0; i < 2; i++) {
            const __m128i eight = _mm_loadu_si128((const __m128i *)words[i][k]);
            start[i] = _mm_add_epi32(start[i], _mm_madd_epi16(eight, _mm_set1_epi16(-8)));
        }
    }
    memcpy(block->high_start + 4 * part, &start[0], 16);
    memcpy(block->low_start + 4 * part, &start[1], 16);

    const __m512d sums = _mm512_add_pd(
        _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(a)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))),
        _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(b)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(b, 1))));
    token.exponent[group] = good ? e - 30 + FIXED_BIAS : FIXED_NONE;
    token.step[group] = good ? float_of_bits((uint32_t)(127 + e - 30) << 23) : NAN;
    token.sum[group] = (float)_mm512_reduce_add_pd(sums);
}

INLINE __mmask16 first_of(int64_t count) {
    return (__mmask16)(count >= 16 ? 0xFFFF : count > 0 ? (1 << count) - 1 : 0);
}

/* Scales or biases first..first+15 of a row, those that `there` names. */
INLINE vf widen16(int type, const uint8_t *row, int64_t first, __mmask16 there) {
    if (type == K3_SCALE_F32) return _mm512_maskz_loadu_ps(there, row + 4 * first);
    const __m256i halves = _mm256_maskz_loadu_epi16(there, row + 2 * first);
    if (type == K3_SCALE_F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* MXFP4: scale times step of up to 16 groups from `first` of a row on. What leaves the range is gathered in `bits`. */
INLINE void steps_mxfp4(const uint8_t *scale, const int32_t *exponent, __mmask16 there, float *out, __m512i *bits) {
    const __m512i field = _mm512_add_epi32(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, scale)),
                                           _mm512_maskz_loadu_epi32(there, exponent));
    *bits = _mm512_or_si512(*bits, field);
    _mm512_storeu_si512(out, _mm512_slli_epi32(_mm512_add_epi32(field, _mm512_set1_epi32(FIXED_FIELD)), 23));
}

/* int4: the same, one number for every 32 columns; to `offset` is added what code 8 contributes, which is the scale times
 * 8 plus the bias. Scales must be in 2^-36..2^63, where their products with a step and an integer are normal numbers. */
INLINE void steps_q4(const int shift, vf scale, vf bias, __mmask16 there, const float *step, const float *sum,
                     int64_t columns, float *out, vf *offset, __mmask16 *outside) {
    const int copies = 1 << (shift - 5);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i size = _mm512_slli_epi32(_mm512_castps_si512(scale), 1), least = _mm512_set1_epi32((127 - 36) << 24);
    *outside |= _mm512_mask_cmpge_epu32_mask(there, _mm512_sub_epi32(size, least), _mm512_set1_epi32(99 << 24));
    bias = _mm512_fmadd_ps(_mm512_set1_ps(8), scale, bias);
    for (int i = 0; i < copies; i++, columns -= 16 * 32) {
        const __mmask16 inside = first_of(columns / 32);
        const __m512i from = _mm512_srli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16 * i)), (unsigned)(shift - 5));
        const vf s = copies == 1 ? scale : _mm512_permutexvar_ps(from, scale);
        const vf b = copies == 1 ? bias : _mm512_permutexvar_ps(from, bias);
        _mm512_storeu_ps(out + 16 * i, _mm512_mul_ps(s, _mm512_maskz_loadu_ps(inside, step + 16 * i)));
        *offset = _mm512_fmadd_ps(b, _mm512_maskz_loadu_ps(inside, sum + 16 * i), *offset);
    }
}

/* Scale times step for every 32 of `columns` columns from c0 on, which starts a group. Whether one is out of range. */
INLINE int fixed_steps(const int format, const int shift, const k3_matrix *m, int64_t row, int64_t c0, int64_t columns,
                       fixed_token x, float *out, vf *offset) {
    const uint8_t *scale = m->scale + row * m->scale_bytes, *bias = m->bias + row * m->scale_bytes;
    const int64_t first = c0 >> shift, count = columns >> shift, full = count / 16 * 16;
    __m512i bits = _mm512_setzero_si512();
    __mmask16 outside = 0;
    for (int64_t i = 0; i < count; i += 16) {
        const int64_t at = i << (shift - 5), left = columns - 32 * at;
        /* whole vectors and the last apart, for the masks of the former to be constants */
        if (format == K3_MXFP4 && i < full)
            steps_mxfp4(scale + first + i, x.exponent + c0 / 32 + i, 0xFFFF, out + i, &bits);
        else if (format == K3_MXFP4)
            steps_mxfp4(scale + first + i, x.exponent + c0 / 32 + i, first_of(count - i), out + i, &bits);
        else if (i < full)
            steps_q4(shift, widen16(m->scale_type, scale, first + i, 0xFFFF), widen16(m->scale_type, bias, first + i, 0xFFFF),
                     0xFFFF, x.step + c0 / 32 + at, x.sum + c0 / 32 + at, 16 << shift, out + at, offset, &outside);
        else
            steps_q4(shift, widen16(m->scale_type, scale, first + i, first_of(count - i)),
                     widen16(m->scale_type, bias, first + i, first_of(count - i)), first_of(count - i),
                     x.step + c0 / 32 + at, x.sum + c0 / 32 + at, left, out + at, offset, &outside);
    }
    return outside != 0 || _mm512_test_epi32_mask(bits, _mm512_set1_epi32(~(FIXED_RANGE - 1))) != 0;
}

/* sum + the 64 bytes at p, which are 128 columns of a row, times a block of x. */
VNNI INLINE vf add_fixed(const int format, const uint8_t *p, const float *steps, const __m512i *high, const __m512i *low,
                    const __m512i *start, __m512i table, __m512i spread, vf sum) {
    __m512i codes = _mm512_loadu_si512(p), w[4], sums[2];
    __asm__("" : "+v"(codes)); /* loaded once */
    for (int k = 0; k < 4; k++) {
        w[k] = k ? _mm512_srli_epi16(codes, 4 * (unsigned)k) : codes;
        if (format == K3_MXFP4) w[k] = _mm512_permutexvar_epi16(w[k], table);
        if (format == K3_Q4 && k < 3) w[k] = _mm512_and_si512(w[k], _mm512_set1_epi16(15));
    }
    for (int i = 0; i < 2; i++) sums[i] = format == K3_Q4 ? start[i] : _mm512_setzero_si512();
    TIMES(k, 4, {
        sums[0] = _mm512_dpwssd_epi32(sums[0], w[k], high[k]);
        sums[1] = _mm512_dpwssd_epi32(sums[1], w[k], low[k]);
    });
    /* both are below 2^24 in size: exact as floats */
    const vf whole = v_fma(_mm512_cvtepi32_ps(sums[0]), _mm512_set1_ps(65536), _mm512_cvtepi32_ps(sums[1]));
    return v_fma(whole, _mm512_permutexvar_ps(spread, _mm512_broadcast_f32x4(_mm_loadu_ps(steps))), sum);
}

/* R rows times a token. Returns a bit for each row that was not computed. Fetches ahead as rows_few does. */
VNNI INLINE int rows_fixed(const int format, const int shift, const int R, const k3_matrix *m, int64_t row0, fixed_token x,
                      float *y) {
    static const int16_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)twice));
    __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __asm__("" : "+v"(spread)); /* stays in its register */
    const int64_t ahead = fetch_distance(R * m->row_bytes);
    float steps[FEW_BLOCK][FIXED_GROUPS];
    uint8_t copy[64] = {0};
    vf sum[FEW_BLOCK], offset[FEW_BLOCK];
    int outside = 0;
    TIMES(r, R, sum[r] = offset[r] = v_zero(););
    fetch_scales(format, R, m, row0);
    for (int64_t c0 = 0; c0 < m->cols; c0 += ONE_DEPTH) {
        const int64_t columns = m->cols - c0 < ONE_DEPTH ? m->cols - c0 : ONE_DEPTH, rest = columns % K3_PAD;
        const uint8_t *p[FEW_BLOCK];
        TIMES(r, R, {
            p[r] = m->weight + (row0 + r) * m->row_bytes + c0 / 2;
            outside |= fixed_steps(format, shift, m, row0 + r, c0, columns, x, steps[r], &offset[r]) << r;
            for (int64_t i = columns / 32; rest && i % 4; i++) steps[r][i] = 0;
        });
        for (int64_t u = 0; u * K3_PAD < columns; u++) {
            const fixed_block *block = x.block + c0 / K3_PAD + u;
            const __m512i start[2] = {_mm512_loadu_si512(block->high_start), _mm512_loadu_si512(block->low_start)};
            __m512i high[4], low[4];
            TIMES(k, 4, high[k] = _mm512_loadu_si512(block->high[k]); low[k] = _mm512_loadu_si512(block->low[k]););
            TIMES(r, R, {
                const uint8_t *from = p[r] + 64 * u;
                __builtin_prefetch(from + ahead, 0, 2);
                if (rest && u == columns / K3_PAD) from = memcpy(copy, from, (size_t)rest / 2);
                sum[r] = add_fixed(format, from, steps[r] + 4 * u, high, low, start, table, spread, sum[r]);
            });
        }
    }
    TIMES(r, R, {
        y[r] = v_sum(v_add(sum[r], offset[r]));
        outside |= (y[r] != y[r]) << r; /* a step that is not there */
    });
    return outside;
}

VNNI INLINE void tile_fixed_format(const int format, const int shift, const k3_matrix *m, int64_t row0, int rows,
                              fixed_token fixed, const float *packed, float *y) {
    for (int r = 0; r < rows;) {
        const int R = rows - r < FEW_BLOCK ? 1 : FEW_BLOCK;
        int outside = R == 1 ? rows_fixed(format, shift, 1, m, row0 + r, fixed, y + r)
                             : rows_fixed(format, shift, FEW_BLOCK, m, row0 + r, fixed, y + r);
        for (; outside; outside &= outside - 1) {
            const int which = r + __builtin_ctz((unsigned)outside);
            rows_few(format, shift, 1, 1, m, row0 + which, &packed, y + which);
            if (format == K3_MXFP4) y[which] *= K3_MXFP4_FACTOR;
        }
        r += R;
    }
}

#define TILE_FIXED(name, format, shift)                                                                            \
    VNNI static __attribute__((noinline)) void name(const k3_matrix *m, int64_t row0, int rows, fixed_token fixed, \
                                               const float *packed, float *y) {                                    \
        tile_fixed_format(format, shift, m, row0, rows, fixed, packed, y);                                         \
    }
TILE_FIXED(fixed_mxfp4, K3_MXFP4, 5)
TILE_FIXED(fixed_q4_32, K3_Q4, 5)
TILE_FIXED(fixed_q4_64, K3_Q4, 6)
TILE_FIXED(fixed_q4_128, K3_Q4, 7)

static void tile_fixed(const k3_matrix *m, int64_t row0, int rows, const uint8_t *fixed, const float *packed, float *y) {
    const fixed_token x = fixed_at((uint8_t *)fixed, m->cols);
    if (m->format == K3_MXFP4)
        fixed_mxfp4(m, row0, rows, x, packed, y);
    else
        (m->group == 32 ? fixed_q4_32 : m->group == 64 ? fixed_q4_64 : fixed_q4_128)(m, row0, rows, x, packed, y);
}
