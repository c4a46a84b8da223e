#line 2 "kda_prefill.metal"
// One KDA layer between its projections, for a long prompt. Arguments, results and grid of kda_step.
//
// Tokens go in sequence, BLOCK of them between barriers: first whole SIMD groups prepare a row each
// (convolution, normalisation, gates), then every SIMD group carries its own value columns through the
// block alone, then whole SIMD groups finish a row each (output norm and gate).
// In the middle part a lane holds KEYS key rows of OWNED columns; KEY_LANES lanes share a column.
// Template: TYPE of the activations, HEADS, HEAD_DIM, CONV_WIDTH, THREADS. Grid: (THREADS, H, B).
constexpr int BLOCK = 8;
constexpr int SIMD_GROUPS = THREADS / 32;
constexpr int COLUMNS = HEAD_DIM / SIMD_GROUPS;
constexpr int COLUMN_LANES = COLUMNS > 1 ? 2 : 1;
constexpr int KEY_LANES = 32 / COLUMN_LANES;
constexpr int KEYS = HEAD_DIM / KEY_LANES;
constexpr int OWNED = COLUMNS / COLUMN_LANES;
constexpr int HISTORY = CONV_WIDTH - 1;
constexpr int PARTS = HEAD_DIM / 32;
constexpr int CHANNELS = HEADS * HEAD_DIM;

threadgroup float s_q[BLOCK * HEAD_DIM];  // normalised and scaled
threadgroup float s_k[BLOCK * HEAD_DIM];  // normalised
threadgroup float s_v[BLOCK * HEAD_DIM];
threadgroup float s_alpha[BLOCK * HEAD_DIM];
threadgroup float s_o[BLOCK * HEAD_DIM];
threadgroup float s_dot[BLOCK];  // q.k
threadgroup float s_beta[BLOCK];

const int tokens = sizes[0];
const int head = int(threadgroup_position_in_grid.y);
const int batch = int(threadgroup_position_in_grid.z);
const int index = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int group = int(simdgroup_index_in_threadgroup);
const int key_lane = lane % KEY_LANES;
const int column0 = group * COLUMNS + lane / KEY_LANES * OWNED;
const int channel0 = head * HEAD_DIM;
const int tokens0 = batch * tokens;

float cells[KEYS * OWNED];
const int cell0 = ((batch * HEADS + head) * HEAD_DIM + key_lane) * HEAD_DIM + column0;
#pragma unroll
for (int j = 0; j < KEYS; ++j) {
  #pragma unroll
  for (int c = 0; c < OWNED; ++c) {
    cells[j * OWNED + c] = state[cell0 + j * KEY_LANES * HEAD_DIM + c];
  }
}

for (int item = index; item < 3 * HISTORY * HEAD_DIM; item += THREADS) {
  const int row = item / HEAD_DIM;  // stream and window row together
  const int stream = row / HISTORY;
  const int channel = channel0 + item % HEAD_DIM;
  const int window0 = (batch * 3 + stream) * HISTORY * CHANNELS + channel;
  auto fresh = stream == 0 ? q : (stream == 1 ? k : v);
  const int s = tokens + row % HISTORY;
  new_windows[(batch * 3 * HISTORY + row) * CHANNELS + channel] =
      TYPE(k3_sample(windows + window0, fresh + (tokens0 * CHANNELS + channel), s, HISTORY, CHANNELS));
}

const float rate = metal::precise::exp(float(A_log[head]));
for (int first = 0; first < tokens; first += BLOCK) {
  const int count = metal::min(BLOCK, tokens - first);

  for (int unit = group; unit < 3 * count; unit += SIMD_GROUPS) {
    const int row = unit / 3;
    const int kind = unit % 3;
    const int t = first + row;
    if (kind == 0) {
      float q_active[PARTS];
      float k_active[PARTS];
      float q_square = 0.0f;
      float k_square = 0.0f;
      float dot = 0.0f;
      #pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int channel = channel0 + part * 32 + lane;
        const int q_window = batch * 3 * HISTORY * CHANNELS + channel;
        const int fresh0 = tokens0 * CHANNELS + channel;
        q_active[part] = k3_silu(k3_short_conv<CONV_WIDTH>(
            windows + q_window, q + fresh0, taps + channel * CONV_WIDTH, t, CHANNELS));
        k_active[part] = k3_silu(k3_short_conv<CONV_WIDTH>(
            windows + (q_window + HISTORY * CHANNELS), k + fresh0,
            taps + (CHANNELS + channel) * CONV_WIDTH, t, CHANNELS));
        q_square += q_active[part] * q_active[part];
        k_square += k_active[part] * k_active[part];
        dot += q_active[part] * k_active[part];
      }
      const float q_scale = k3_inverse_root(metal::simd_sum(q_square) + numbers[2]) * numbers[3];
      const float k_scale = k3_inverse_root(metal::simd_sum(k_square) + numbers[2]);
      const float dot_sum = metal::simd_sum(dot);
      #pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        s_q[row * HEAD_DIM + part * 32 + lane] = q_active[part] * q_scale;
        s_k[row * HEAD_DIM + part * 32 + lane] = k_active[part] * k_scale;
      }
      if (lane == 0) {
        s_dot[row] = dot_sum * q_scale * k_scale;
        s_beta[row] = k3_sigmoid(float(b[(tokens0 + t) * HEADS + head]));
      }
    } else if (kind == 1) {
      #pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int channel = channel0 + part * 32 + lane;
        s_v[row * HEAD_DIM + part * 32 + lane] = k3_silu(k3_short_conv<CONV_WIDTH>(
            windows + ((batch * 3 + 2) * HISTORY * CHANNELS + channel), v + (tokens0 * CHANNELS + channel),
            taps + (2 * CHANNELS + channel) * CONV_WIDTH, t, CHANNELS));
      }
    } else {
      #pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int channel = channel0 + part * 32 + lane;
        const float shifted = float(z[(tokens0 + t) * CHANNELS + channel]) + float(dt_bias[channel]);
        s_alpha[row * HEAD_DIM + part * 32 + lane] =
            metal::precise::exp(numbers[0] * k3_sigmoid(rate * shifted));
      }
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  for (int row = 0; row < count; ++row) {
    float k_own[KEYS];
    float read_k[OWNED];
    float read_q[OWNED];
    #pragma unroll
    for (int c = 0; c < OWNED; ++c) {
      read_k[c] = 0.0f;
      read_q[c] = 0.0f;
    }
    #pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      const int key = row * HEAD_DIM + key_lane + j * KEY_LANES;
      const float alpha = s_alpha[key];
      const float q_own = s_q[key];
      k_own[j] = s_k[key];
      #pragma unroll
      for (int c = 0; c < OWNED; ++c) {
        cells[j * OWNED + c] *= alpha;
        read_k[c] += k_own[j] * cells[j * OWNED + c];
        read_q[c] += q_own * cells[j * OWNED + c];
      }
    }
    #pragma unroll
    for (int c = 0; c < OWNED; ++c) {
      #pragma unroll
      for (int step = KEY_LANES / 2; step > 0; step /= 2) {
        read_k[c] += metal::simd_shuffle_xor(read_k[c], ushort(step));
        read_q[c] += metal::simd_shuffle_xor(read_q[c], ushort(step));
      }
      const int cell = row * HEAD_DIM + column0 + c;
      const float error = s_beta[row] * (s_v[cell] - read_k[c]);
      #pragma unroll
      for (int j = 0; j < KEYS; ++j) {
        cells[j * OWNED + c] += k_own[j] * error;
      }
      if (key_lane == 0) {
        s_o[cell] = read_q[c] + s_dot[row] * error;
      }
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  for (int row = group; row < count; row += SIMD_GROUPS) {
    float square = 0.0f;
    #pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const float o = s_o[row * HEAD_DIM + part * 32 + lane];
      square += o * o;
    }
    const float scale = k3_inverse_root(metal::simd_sum(square) / float(HEAD_DIM) + numbers[1]);
    #pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int within = part * 32 + lane;
      const int out_cell = (tokens0 + first + row) * CHANNELS + channel0 + within;
      out[out_cell] = TYPE(
          s_o[row * HEAD_DIM + within] * scale * float(o_norm[within]) * k3_sigmoid(float(gate[out_cell])));
    }
  }
}

#pragma unroll
for (int j = 0; j < KEYS; ++j) {
  #pragma unroll
  for (int c = 0; c < OWNED; ++c) {
    new_state[cell0 + j * KEY_LANES * HEAD_DIM + c] = cells[j * OWNED + c];
  }
}
