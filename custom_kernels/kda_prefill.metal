#line 2 "kda_prefill.metal"
// One KDA layer between its projections, for a long prompt. Arguments, results and grid of kda_step.
//
// Tokens go in sequence, BLOCK of them between barriers. First every thread convolves its channels, whose
// samples it fetched while the block before was under way; then a SIMD group a row normalises q and k; then
// every SIMD group carries its own value columns through the block alone; then a SIMD group a row finishes.
// In the third part a lane holds KEYS key rows of OWNED columns, and KEY_LANES lanes share a column.
// Template: TYPE of the activations, HEADS, HEAD_DIM, CONV_WIDTH, THREADS. Grid: (THREADS, H, B).
constexpr int BLOCK = 8;
constexpr int SIMD_GROUPS = THREADS / 32;
constexpr int COLUMNS = HEAD_DIM / SIMD_GROUPS;
constexpr int COLUMN_LANES = COLUMNS > 1 ? 2 : 1;
constexpr int KEY_LANES = 32 / COLUMN_LANES;
constexpr int KEYS = HEAD_DIM / KEY_LANES;
constexpr int OWNED = COLUMNS / COLUMN_LANES;
constexpr int BATCH = OWNED < KEY_LANES / 2 ? OWNED : KEY_LANES / 2;  // columns that are summed together
constexpr int SPREAD = KEY_LANES / 2 / BATCH;  // lanes that end up with the same sum
constexpr int HISTORY = CONV_WIDTH - 1;
constexpr int ITEMS = (4 * HEAD_DIM + THREADS - 1) / THREADS;
constexpr int PARTS = HEAD_DIM / 32;
constexpr int CHANNELS = HEADS * HEAD_DIM;

threadgroup float s_q[BLOCK * HEAD_DIM];
threadgroup float s_k[BLOCK * HEAD_DIM];
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
const int within = index % HEAD_DIM;  // of the channels that this thread convolves
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
float history[ITEMS * HISTORY];
float own_taps[ITEMS * CONV_WIDTH];
float ahead[ITEMS * BLOCK];  // samples of the next block: q, k, v or z of a channel
#pragma unroll
for (int n = 0; n < ITEMS; ++n) {
  const int stream = (index + n * THREADS) / HEAD_DIM;
  const int channel = channel0 + within;
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
const float shift = float(dt_bias[channel0 + within]);

for (int first = -BLOCK; first < tokens; first += BLOCK) {
  const int count = metal::min(BLOCK, tokens - first);
  if (first >= 0) {
    #pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
      const int stream = (index + n * THREADS) / HEAD_DIM;
      #pragma unroll
      for (int row = 0; row < BLOCK; ++row) {
        const float sample = ahead[n * BLOCK + row];
        const int cell = row * HEAD_DIM + within;
        if (stream < 3) {
          if (row < count) {
            float sum = sample * own_taps[n * CONV_WIDTH + HISTORY];
            #pragma unroll
            for (int back = 0; back < HISTORY; ++back) {
              sum += history[n * HISTORY + back] * own_taps[n * CONV_WIDTH + back];
              history[n * HISTORY + back] =
                  back + 1 < HISTORY ? history[n * HISTORY + back + 1] : sample;
            }
            const float active = k3_silu(sum);
            if (stream == 0) {
              s_q[cell] = active;
            } else if (stream == 1) {
              s_k[cell] = active;
            } else {
              s_v[cell] = active;
            }
          }
        } else if (stream == 3) {
          s_alpha[cell] = metal::precise::exp(numbers[0] * k3_sigmoid(rate * (sample + shift)));
        }
      }
    }
  }
  #pragma unroll
  for (int n = 0; n < ITEMS; ++n) {
    const int stream = (index + n * THREADS) / HEAD_DIM;
    auto fresh = stream == 0 ? q : (stream == 1 ? k : (stream == 2 ? v : z));
    #pragma unroll
    for (int row = 0; row < BLOCK; ++row) {
      const int t = metal::min(first + BLOCK + row, tokens - 1);  // past the end: loaded, not used
      ahead[n * BLOCK + row] = float(fresh[(tokens0 + t) * CHANNELS + channel0 + within]);
    }
  }
  if (first < 0) {
    continue;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  for (int row = group; row < count; row += SIMD_GROUPS) {
    float q_square = 0.0f;
    float k_square = 0.0f;
    float dot = 0.0f;
    #pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const float q_own = s_q[row * HEAD_DIM + part * 32 + lane];
      const float k_own = s_k[row * HEAD_DIM + part * 32 + lane];
      q_square += q_own * q_own;
      k_square += k_own * k_own;
      dot += q_own * k_own;
    }
    const float q_scale = k3_inverse_root(metal::simd_sum(q_square) + numbers[2]) * numbers[3];
    const float k_scale = k3_inverse_root(metal::simd_sum(k_square) + numbers[2]);
    const float dot_sum = metal::simd_sum(dot);
    #pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      s_q[row * HEAD_DIM + part * 32 + lane] *= q_scale;
      s_k[row * HEAD_DIM + part * 32 + lane] *= k_scale;
    }
    if (lane == 0) {
      s_dot[row] = dot_sum * q_scale * k_scale;
      s_beta[row] = k3_sigmoid(float(b[(tokens0 + first + row) * HEADS + head]));
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
    for (int base = 0; base < OWNED; base += BATCH) {
      // Sums over the key lanes, halving what a lane still sums at each step: first whether it is a read
      // with k or with q, then the column. A lane ends with one sum, that of column `own`.
      float sums[2 * BATCH];
      #pragma unroll
      for (int c = 0; c < BATCH; ++c) {
        sums[c] = read_k[base + c];
        sums[BATCH + c] = read_q[base + c];
      }
      int half_count = BATCH;
      #pragma unroll
      for (int step = KEY_LANES / 2; step > 0; step /= 2) {
        if (half_count > 0) {
          const bool upper = (key_lane & step) != 0;
          #pragma unroll
          for (int c = 0; c < BATCH; ++c) {
            if (c < half_count) {
              const float kept = upper ? sums[half_count + c] : sums[c];
              const float given = upper ? sums[c] : sums[half_count + c];
              sums[c] = kept + metal::simd_shuffle_xor(given, ushort(step));
            }
          }
          half_count /= 2;
        } else {
          sums[0] += metal::simd_shuffle_xor(sums[0], ushort(step));
        }
      }
      const int own = key_lane % (KEY_LANES / 2) / SPREAD;
      const int cell = row * HEAD_DIM + column0 + base + own;
      const float error = s_beta[row] * (s_v[cell] - sums[0]);  // meaningful in the lanes that read with k
      const float partner = metal::simd_shuffle_xor(error, ushort(KEY_LANES / 2));
      if (key_lane >= KEY_LANES / 2 && key_lane % SPREAD == 0) {
        s_o[cell] = sums[0] + s_dot[row] * partner;
      }
      #pragma unroll
      for (int c = 0; c < BATCH; ++c) {
        const float write = metal::simd_shuffle(error, ushort(lane - key_lane + c * SPREAD));
        #pragma unroll
        for (int j = 0; j < KEYS; ++j) {
          cells[j * OWNED + base + c] += k_own[j] * write;
        }
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
      const int channel = part * 32 + lane;
      const int out_cell = (tokens0 + first + row) * CHANNELS + channel0 + channel;
      out[out_cell] = TYPE(
          s_o[row * HEAD_DIM + channel] * scale * float(o_norm[channel]) * k3_sigmoid(float(gate[out_cell])));
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
#pragma unroll
for (int n = 0; n < ITEMS; ++n) {
  const int stream = (index + n * THREADS) / HEAD_DIM;
  if (stream < 3) {
    #pragma unroll
    for (int row = 0; row < HISTORY; ++row) {
      new_windows[((batch * 3 + stream) * HISTORY + row) * CHANNELS + channel0 + within] =
          TYPE(history[n * HISTORY + row]);
    }
  }
}
