// Metal's names on CUDA, for kernel texts written in the common ground of both. Comes before k3_common.metal.
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };

// CUDA's barrier orders all memory, Metal's only what its flag names: the emulator checks the flags.
inline void threadgroup_barrier(mem_flags) {
  __syncthreads();
}

inline float simd_sum(float x) {
  #pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  return x;
}
inline unsigned simd_max(unsigned x) {
  return __reduce_max_sync(0xffffffffu, x);
}
inline unsigned simd_min(unsigned x) {
  return __reduce_min_sync(0xffffffffu, x);
}
inline float simd_shuffle_xor(float x, unsigned short mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

inline float simd_shuffle(float x, unsigned short lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

inline float max(float a, float b) {
  return fmaxf(a, b);
}
inline int min(int a, int b) {
  return a < b ? a : b;
}

namespace precise {
inline float exp(float x) {
  return expf(x);
}
inline float sqrt(float x) {
  return sqrtf(x);
}
}  // namespace precise
}  // namespace metal

template <typename To, typename From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  union {
    From from;
    To to;
  } bits = {value};
  return bits.to;
}

typedef unsigned int uint;
typedef unsigned short ushort;

#define device
#define constant
#define thread
#define threadgroup __shared__
#define threadgroup_position_in_grid blockIdx
// the launchers use one-dimensional threadgroups
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x % 32u)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32u)
#define thread_position_in_grid k3_thread_position()
#define threads_per_simdgroup 32u

inline uint3 k3_thread_position() {
  return make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y, blockIdx.z);
}
