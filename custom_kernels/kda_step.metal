#line 2 "kda_step.metal"
// One KDA layer between its projections, for a few tokens: convolution, gates, recurrence, output norm.
//
// q, k, v, z, gate [B, T, H*D], b [B, T, H] raw projections; windows [B, 3, W-1, H*D]; state [B, H, D, D],
// key channel first; taps [3, H*D, W], A_log [H], dt_bias [H*D], o_norm [D];
// sizes = T; numbers = lower bound, eps, l2_eps, D^-0.5.
// out [B, T, H*D], new_windows, new_state as they came in.
// Template: TYPE of the activations, HEADS, HEAD_DIM, CONV_WIDTH, THREADS. Grid: (THREADS, H, B).
//
// A thread owns ROWS key rows of one value column and up to ITEMS channels of the convolutions, in registers
// from the first token to the last. What does not depend on T is loaded before anything waits.
// The read-out after the write is q.S_new = q.S_decayed + (q.k) e, so both read-outs share one reduction.
constexpr int ROW_GROUPS = THREADS / HEAD_DIM;
constexpr int ROWS = HEAD_DIM / ROW_GROUPS;
constexpr int HISTORY = CONV_WIDTH - 1;
constexpr int ITEMS = (3 * HEAD_DIM + THREADS - 1) / THREADS;
constexpr int PARTS = HEAD_DIM / 32;
constexpr int CHANNELS = HEADS * HEAD_DIM;

threadgroup float s_active[3 * HEAD_DIM];  // q, k, v after convolution and SiLU, not yet normalised
threadgroup float s_alpha[HEAD_DIM];
threadgroup float s_square[2 * PARTS];  // sums of squares of q and k, a SIMD group each
threadgroup float s_read_k[THREADS];
threadgroup float s_read_q[THREADS];
threadgroup float s_dot[ROW_GROUPS];  // parts of q.k
threadgroup float s_norm[PARTS];

const int head = int(threadgroup_position_in_grid.y);
const int batch = int(threadgroup_position_in_grid.z);
const int index = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int column = index % HEAD_DIM;
const int row_group = index / HEAD_DIM;
const int row0 = row_group * ROWS;
const int channel0 = head * HEAD_DIM;

float cells[ROWS];
const int cell0 = ((batch * HEADS + head) * HEAD_DIM + row0) * HEAD_DIM + column;
#pragma unroll
for (int r = 0; r < ROWS; ++r) {
  cells[r] = state[cell0 + r * HEAD_DIM];
}
float history[ITEMS * HISTORY];
float own_taps[ITEMS * CONV_WIDTH];
#pragma unroll
for (int n = 0; n < ITEMS; ++n) {
  const int item = index + n * THREADS;
  const int stream = item / HEAD_DIM;
  const int channel = channel0 + column;
  if (stream < 3) {
    #pragma unroll
    for (int row = 0; row < HISTORY; ++row) {
      history[n * HISTORY + row] =
          float(windows[((batch * 3 + stream) * HISTORY + row) * CHANNELS + channel]);
    }
    #pragma unroll
    for (int tap = 0; tap < CONV_WIDTH; ++tap) {
      own_taps[n * CONV_WIDTH + tap] = float(taps[(stream * CHANNELS + channel) * CONV_WIDTH + tap]);
    }
  }
}
const float rate = metal::precise::exp(float(A_log[head]));
const float shift = float(dt_bias[channel0 + column]);
const float own_norm = float(o_norm[column]);
const int tokens = sizes[0];

for (int t = 0; t < tokens; ++t) {
  const int token = batch * tokens + t;
  const int cell = token * CHANNELS + channel0 + column;
  const float beta = k3_sigmoid(float(b[token * HEADS + head]));
  const float out_scale = k3_sigmoid(float(gate[cell])) * own_norm;

  // q, k, v, a channel a thread; a SIMD group never straddles two of them
  #pragma unroll
  for (int n = 0; n < ITEMS; ++n) {
    const int item = index + n * THREADS;
    const int stream = item / HEAD_DIM;
    if (stream < 3) {
      const float sample = float(stream == 0 ? q[cell] : (stream == 1 ? k[cell] : v[cell]));
      float sum = sample * own_taps[n * CONV_WIDTH + HISTORY];
      #pragma unroll
      for (int row = 0; row < HISTORY; ++row) {
        sum += history[n * HISTORY + row] * own_taps[n * CONV_WIDTH + row];
        history[n * HISTORY + row] = row + 1 < HISTORY ? history[n * HISTORY + row + 1] : sample;
      }
      const float active = k3_silu(sum);
      s_active[item] = active;
      if (stream < 2) {
        const float square = metal::simd_sum(active * active);
        if (lane == 0) {
          s_square[item / 32] = square;
        }
      }
    }
  }
  if (row_group == ROW_GROUPS - 1) {  // the threads with the least to do above
    const float g = numbers[0] * k3_sigmoid(rate * (float(z[cell]) + shift));
    s_alpha[column] = metal::precise::exp(g);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  float read_k = 0.0f;
  float read_q = 0.0f;
  float dot = 0.0f;
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float q_row = s_active[row0 + r];
    const float k_row = s_active[HEAD_DIM + row0 + r];
    cells[r] *= s_alpha[row0 + r];
    read_k += k_row * cells[r];
    read_q += q_row * cells[r];
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
  #pragma unroll
  for (int g = 0; g < ROW_GROUPS; ++g) {
    read_k += s_read_k[g * HEAD_DIM + column];
    read_q += s_read_q[g * HEAD_DIM + column];
    dot += s_dot[g];
  }
  float q_square = 0.0f;
  float k_square = 0.0f;
  #pragma unroll
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
    cells[r] += s_active[HEAD_DIM + row0 + r] * write;
  }
  const float o = q_scale * (read_q + dot * write);
  if (row_group == 0) {
    const float square = metal::simd_sum(o * o);
    if (lane == 0) {
      s_norm[index / 32] = square;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  if (row_group == 0) {
    float square = 0.0f;
    #pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      square += s_norm[part];
    }
    out[cell] = TYPE(o * k3_inverse_root(square / float(HEAD_DIM) + numbers[1]) * out_scale);
  }
}

#pragma unroll
for (int r = 0; r < ROWS; ++r) {
  new_state[cell0 + r * HEAD_DIM] = cells[r];
}
#pragma unroll
for (int n = 0; n < ITEMS; ++n) {
  const int stream = (index + n * THREADS) / HEAD_DIM;
  if (stream < 3) {
    #pragma unroll
    for (int row = 0; row < HISTORY; ++row) {
      new_windows[((batch * 3 + stream) * HISTORY + row) * CHANNELS + channel0 + column] =
          TYPE(history[n * HISTORY + row]);
    }
  }
}
