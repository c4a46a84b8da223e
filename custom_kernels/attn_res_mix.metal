#line 2 "attn_res_mix.metal"
// Depth mix of up to 8 frozen blocks and the partial sum, and the RMSNorm that follows.
//
// blocks [N, T, D] (any array where N = 0), partial [T, D], norm [D], query [D], out_norm [D];
// sizes = N, T; numbers = eps. mixed [T, D], normed [T, D].
// Template: TYPE of the results, WIDTH = D, THREADS. Grid: (THREADS, T).
//
// A thread owns every THREADS-th component. Scores come from the sources as they are read first; the
// second reading, for the average, finds them in the cache. The norm uses the average before rounding.
constexpr int MAX_SOURCES = 9;
constexpr int SIMD_GROUPS = THREADS / 32;
constexpr int OWNED = (WIDTH + THREADS - 1) / THREADS;

threadgroup float s_dot[MAX_SOURCES * SIMD_GROUPS];
threadgroup float s_square[MAX_SOURCES * SIMD_GROUPS];
threadgroup float s_mixed[SIMD_GROUPS];

const int frozen = sizes[0];
const int tokens = sizes[1];
const int token = int(threadgroup_position_in_grid.y);
const int index = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int group = int(simdgroup_index_in_threadgroup);

float directions[OWNED];
float ahead[OWNED];  // components of the next source
#pragma unroll
for (int n = 0; n < OWNED; ++n) {
  const int i = index + n * THREADS;
  directions[n] = i < WIDTH ? float(norm[i]) * float(query[i]) : 0.0f;
}
for (int j = -1; j <= frozen; ++j) {
  float dot = 0.0f;
  float square = 0.0f;
  if (j >= 0) {
    #pragma unroll
    for (int n = 0; n < OWNED; ++n) {
      dot += directions[n] * ahead[n];
      square += ahead[n] * ahead[n];
    }
  }
  if (j < frozen) {
    auto next = j + 1 < frozen ? blocks + ((j + 1) * tokens + token) * WIDTH : partial + token * WIDTH;
    #pragma unroll
    for (int n = 0; n < OWNED; ++n) {
      const int i = index + n * THREADS;
      ahead[n] = i < WIDTH ? float(next[i]) : 0.0f;
    }
  }
  if (j >= 0) {
    const float dot_sum = metal::simd_sum(dot);
    const float square_sum = metal::simd_sum(square);
    if (lane == 0) {
      s_dot[j * SIMD_GROUPS + group] = dot_sum;
      s_square[j * SIMD_GROUPS + group] = square_sum;
    }
  }
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

float weights[MAX_SOURCES];
float largest = -INFINITY;
#pragma unroll
for (int j = 0; j < MAX_SOURCES; ++j) {
  if (j <= frozen) {
    float dot_sum = 0.0f;
    float square_sum = 0.0f;
    for (int g = 0; g < SIMD_GROUPS; ++g) {
      dot_sum += s_dot[j * SIMD_GROUPS + g];
      square_sum += s_square[j * SIMD_GROUPS + g];
    }
    weights[j] = dot_sum * k3_inverse_root(square_sum / float(WIDTH) + numbers[0]);
    largest = metal::max(largest, weights[j]);
  }
}
float total = 0.0f;
#pragma unroll
for (int j = 0; j < MAX_SOURCES; ++j) {
  if (j <= frozen) {
    weights[j] = metal::precise::exp(weights[j] - largest);
    total += weights[j];
  }
}

float own[OWNED];
#pragma unroll
for (int n = 0; n < OWNED; ++n) {
  own[n] = 0.0f;
}
#pragma unroll
for (int j = 0; j < MAX_SOURCES; ++j) {
  if (j <= frozen) {
    auto source = j < frozen ? blocks + (j * tokens + token) * WIDTH : partial + token * WIDTH;
    const float weight = weights[j] / total;
    #pragma unroll
    for (int n = 0; n < OWNED; ++n) {
      const int i = index + n * THREADS;
      own[n] += i < WIDTH ? weight * float(source[i]) : 0.0f;
    }
  }
}
float square = 0.0f;
#pragma unroll
for (int n = 0; n < OWNED; ++n) {
  const int i = index + n * THREADS;
  square += own[n] * own[n];
  if (i < WIDTH) {
    mixed[token * WIDTH + i] = TYPE(own[n]);
  }
}
const float square_sum = metal::simd_sum(square);
if (lane == 0) {
  s_mixed[group] = square_sum;
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

float mixed_square = 0.0f;
for (int g = 0; g < SIMD_GROUPS; ++g) {
  mixed_square += s_mixed[g];
}
const float scale = k3_inverse_root(mixed_square / float(WIDTH) + numbers[0]);
#pragma unroll
for (int n = 0; n < OWNED; ++n) {
  const int i = index + n * THREADS;
  if (i < WIDTH) {
    normed[token * WIDTH + i] = TYPE(own[n] * scale * float(out_norm[i]));
  }
}
