#line 2 "route_topk.metal"
// Choice of K experts of a token from its router logits, and their weights.
//
// logits [T, E] float32, bias [E]; numbers = scaling.
// ids [T, K] int32 by falling biased score, equal scores by rising id; weights [T, K] float32;
// flags [T] int32, 1 where a biased score was NaN (such an expert ranks below every other).
// Template: EXPERTS, TOP, THREADS. Grid: (THREADS, T).
//
// Each SIMD group extracts the best TOP of its own experts; then every candidate counts the candidates
// that are better than itself, and its count is its place.
constexpr int SIMD_GROUPS = THREADS / 32;
constexpr int OWNED = (EXPERTS + THREADS - 1) / THREADS;
constexpr int CANDIDATES = SIMD_GROUPS * TOP;
constexpr uint NOBODY = 0xffffffffu;

threadgroup uint s_key[CANDIDATES];
threadgroup uint s_id[CANDIDATES];
threadgroup float s_score[TOP];
threadgroup uint s_nan[SIMD_GROUPS];

const int token = int(threadgroup_position_in_grid.y);
const int index = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int group = int(simdgroup_index_in_threadgroup);

// keys order as the biased scores do: 0 nobody (or taken), 1 NaN, else the bits of the float made monotone
uint keys[OWNED];
uint nan_here = 0u;
#pragma unroll
for (int n = 0; n < OWNED; ++n) {
  const int expert = index + n * THREADS;
  keys[n] = 0u;
  if (expert < EXPERTS) {
    const float biased = k3_sigmoid(logits[token * EXPERTS + expert]) + float(bias[expert]);
    const uint bits = as_type<uint>(biased);
    keys[n] = (bits & 0x80000000u) != 0u ? ~bits : (bits | 0x80000000u);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
      keys[n] = 1u;
      nan_here = 1u;
    }
  }
}
const uint nan_in_group = metal::simd_max(nan_here);
if (lane == 0) {
  s_nan[group] = nan_in_group;
}

for (int place = 0; place < TOP; ++place) {
  uint best_key = 0u;
  uint best_id = NOBODY;
  #pragma unroll
  for (int n = 0; n < OWNED; ++n) {
    if (keys[n] > best_key) {  // ids rise with n, so the first of equals stays
      best_key = keys[n];
      best_id = uint(index + n * THREADS);
    }
  }
  const uint group_key = metal::simd_max(best_key);
  const uint group_id = metal::simd_min(best_key == group_key ? best_id : NOBODY);
  if (lane == 0) {
    s_key[group * TOP + place] = group_key;
    s_id[group * TOP + place] = group_id;
  }
  #pragma unroll
  for (int n = 0; n < OWNED; ++n) {
    if (uint(index + n * THREADS) == group_id) {
      keys[n] = 0u;
    }
  }
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

for (int candidate = index; candidate < CANDIDATES; candidate += THREADS) {
  const uint key = s_key[candidate];
  const uint id = s_id[candidate];
  int place = 0;
  for (int other = 0; other < CANDIDATES; ++other) {
    const uint other_key = s_key[other];
    if (other_key > key || (other_key == key && s_id[other] < id)) {
      ++place;
    }
  }
  if (key != 0u && place < TOP) {
    ids[token * TOP + place] = int(id);
    s_score[place] = k3_sigmoid(logits[token * EXPERTS + int(id)]);
  }
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

if (index < TOP) {
  float total = 0.0f;
  for (int place = 0; place < TOP; ++place) {
    total += s_score[place];
  }
  weights[token * TOP + index] = s_score[index] / (total + 1e-20f) * numbers[0];
}
if (index == 0) {
  uint any = 0u;
  for (int g = 0; g < SIMD_GROUPS; ++g) {
    any |= s_nan[g];
  }
  flags[token] = int(any);
}
