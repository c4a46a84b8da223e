#line 2 "kda_step.metal"
// One KDA layer between its projections, for 1 to 32 tokens: convolution, gates, recurrence, output norm.
//
// q, k, v, z, gate [B, T, H*D], b [B, T, H] raw projections; windows [B, 3, W-1, H*D]; state [B, H, D, D],
// key channel first; taps [3, H*D, W], A_log [H], dt_bias [H*D], o_norm [D];
// sizes = heads, tokens; numbers = lower bound, eps, l2_eps, D^-0.5.
// out [B, T, H*D], new_windows, new_state as they came in.
// Template: TYPE of the activations, HEAD_DIM, CONV_WIDTH, THREADS. Grid: (THREADS, heads, batch).
//
// A thread owns ROWS key rows of one value column, in registers from the first token to the last.
// The read-out after the write is q.S_new = q.S_decayed + (q.k) e, so both read-outs share one reduction.
constexpr int ROW_GROUPS = THREADS / HEAD_DIM;
constexpr int ROWS = HEAD_DIM / ROW_GROUPS;
constexpr int HISTORY = CONV_WIDTH - 1;
constexpr int PARTS = HEAD_DIM / 32;

threadgroup float s_active[3 * HEAD_DIM];  // q, k, v after convolution and SiLU, not yet normalised
threadgroup float s_alpha[HEAD_DIM];
threadgroup float s_square[2 * PARTS];  // sums of squares of q and k, a SIMD group each
threadgroup float s_read_k[THREADS];
threadgroup float s_read_q[THREADS];
threadgroup float s_dot[ROW_GROUPS];  // parts of q.k
threadgroup float s_norm[PARTS];

const int heads = sizes[0];
const int tokens = sizes[1];
const int head = int(threadgroup_position_in_grid.y);
const int batch = int(threadgroup_position_in_grid.z);
const int index = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int column = index % HEAD_DIM;
const int row_group = index / HEAD_DIM;
const int row0 = row_group * ROWS;
const int channels = heads * HEAD_DIM;
const int channel0 = head * HEAD_DIM;
const int tokens0 = batch * tokens;

float column_state[ROWS];
const int cell0 = ((batch * heads + head) * HEAD_DIM + row0) * HEAD_DIM + column;
#pragma unroll
for (int r = 0; r < ROWS; ++r) {
  column_state[r] = state[cell0 + r * HEAD_DIM];
}

for (int item = index; item < 3 * HISTORY * HEAD_DIM; item += THREADS) {
  const int row = item / HEAD_DIM;  // stream and window row together
  const int stream = row / HISTORY;
  const int channel = channel0 + item % HEAD_DIM;
  const int window0 = (batch * 3 + stream) * HISTORY * channels + channel;
  auto fresh = stream == 0 ? q : (stream == 1 ? k : v);
  const int s = tokens + row % HISTORY;
  new_windows[(batch * 3 * HISTORY + row) * channels + channel] =
      TYPE(k3_sample(windows + window0, fresh + (tokens0 * channels + channel), s, HISTORY, channels));
}

const float rate = metal::precise::exp(float(A_log[head]));
for (int t = 0; t < tokens; ++t) {
  const int token = tokens0 + t;

  // q, k, v and the decay, a channel a thread; a SIMD group never straddles two of them
  for (int item = index; item < 4 * HEAD_DIM; item += THREADS) {
    const int stream = item / HEAD_DIM;
    const int within = item % HEAD_DIM;
    const int channel = channel0 + within;
    if (stream < 3) {
      const int window0 = (batch * 3 + stream) * HISTORY * channels + channel;
      auto fresh = stream == 0 ? q : (stream == 1 ? k : v);
      const float active = k3_silu(k3_short_conv<CONV_WIDTH>(
          windows + window0, fresh + (tokens0 * channels + channel),
          taps + (stream * channels + channel) * CONV_WIDTH, t, channels));
      s_active[item] = active;
      if (stream < 2) {
        const float square = metal::simd_sum(active * active);
        if (lane == 0) {
          s_square[item / 32] = square;
        }
      }
    } else {
      const float shifted = float(z[token * channels + channel]) + float(dt_bias[channel]);
      s_alpha[within] = metal::precise::exp(numbers[0] * k3_sigmoid(rate * shifted));
    }
  }
  const float beta = k3_sigmoid(float(b[token * heads + head]));
  const int out_cell = token * channels + channel0 + column;
  const float out_scale = k3_sigmoid(float(gate[out_cell])) * float(o_norm[column]);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  float read_k = 0.0f;
  float read_q = 0.0f;
  float dot = 0.0f;
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float q_row = s_active[row0 + r];
    const float k_row = s_active[HEAD_DIM + row0 + r];
    column_state[r] *= s_alpha[row0 + r];
    read_k += k_row * column_state[r];
    read_q += q_row * column_state[r];
    dot += q_row * k_row;
  }
  s_read_k[index] = read_k;
  s_read_q[index] = read_q;
  if (column == 0) {
    s_dot[row_group] = dot;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  read_k = 0.0f;
  read_q = 0.0f;
  dot = 0.0f;
  for (int g = 0; g < ROW_GROUPS; ++g) {
    read_k += s_read_k[g * HEAD_DIM + column];
    read_q += s_read_q[g * HEAD_DIM + column];
    dot += s_dot[g];
  }
  float q_square = 0.0f;
  float k_square = 0.0f;
  for (int part = 0; part < PARTS; ++part) {
    q_square += s_square[part];
    k_square += s_square[PARTS + part];
  }
  const float q_scale = k3_inverse_root(q_square + numbers[2]) * numbers[3];
  const float k_scale = k3_inverse_root(k_square + numbers[2]);
  const float error = beta * (s_active[2 * HEAD_DIM + column] - k_scale * read_k);
  const float write = k_scale * error;
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    column_state[r] += s_active[HEAD_DIM + row0 + r] * write;
  }
  const float o = q_scale * (read_q + dot * write);
  if (index < HEAD_DIM) {
    const float square = metal::simd_sum(o * o);
    if (lane == 0) {
      s_norm[index / 32] = square;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  if (index < HEAD_DIM) {
    float square = 0.0f;
    for (int part = 0; part < PARTS; ++part) {
      square += s_norm[part];
    }
    out[out_cell] = TYPE(o * k3_inverse_root(square / float(HEAD_DIM) + numbers[1]) * out_scale);
  }
}

#pragma unroll
for (int r = 0; r < ROWS; ++r) {
  new_state[cell0 + r * HEAD_DIM] = column_state[r];
}
