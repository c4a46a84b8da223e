// Metal's names for g++: what a kernel text may use, and nothing more. Owns types, address-space words and
// functions; what happens at a barrier, a SIMD operation or a memory access is decided in runtime.cpp.
#pragma once
#include <cstdint>

#define device
#define constant
#define thread
// Statics serve as threadgroup memory, since one process runs one threadgroup at a time. The alignment keeps
// a gap behind each array; `used` keeps g++ from folding an array that is never written.
#define threadgroup static __attribute__((aligned(65536), used))
#define K3_INLINE inline __attribute__((always_inline))
#define INFINITY __builtin_inff()

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

struct uint3 {
  uint x, y, z;
};

// 16-bit floats convert to float silently and from float only when asked, as in Metal.
class bfloat16_t {
  uint16_t bits_;

 public:
  constexpr bfloat16_t() : bits_(0) {}
  explicit K3_INLINE bfloat16_t(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    bits_ = (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t(bits >> 16 | 64u)
                                               : uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  K3_INLINE operator float() const { return __builtin_bit_cast(float, uint32_t(bits_) << 16); }
};

class float16_t {
  _Float16 value_;

 public:
  constexpr float16_t() : value_(0) {}
  explicit K3_INLINE float16_t(float x) : value_(static_cast<_Float16>(x)) {}
  K3_INLINE operator float() const { return static_cast<float>(value_); }
};
typedef float16_t half;

extern "C" {
void k3_emulator_barrier(int simdgroup_only, int flags);
uint32_t k3_emulator_simd(int operation, uint32_t bits, uint32_t argument);
}

template <typename To, typename From>
K3_INLINE To as_type(From value) {
  return __builtin_bit_cast(To, value);
}

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
K3_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
K3_INLINE void threadgroup_barrier(mem_flags flags) { k3_emulator_barrier(0, int(flags)); }
K3_INLINE void simdgroup_barrier(mem_flags flags) { k3_emulator_barrier(1, int(flags)); }

// operation codes are those of runtime.cpp
#define K3_SIMD(NAME, TYPE, CODE) \
  K3_INLINE TYPE NAME(TYPE x) { return as_type<TYPE>(k3_emulator_simd(CODE, as_type<uint32_t>(x), 0)); }
K3_SIMD(simd_sum, float, 0)
K3_SIMD(simd_max, float, 1)
K3_SIMD(simd_min, float, 2)
K3_SIMD(simd_sum, uint, 3)
K3_SIMD(simd_max, uint, 4)
K3_SIMD(simd_min, uint, 5)
#define K3_SHUFFLE(NAME, TYPE, CODE) \
  K3_INLINE TYPE NAME(TYPE x, ushort n) { return as_type<TYPE>(k3_emulator_simd(CODE, as_type<uint32_t>(x), n)); }
K3_SHUFFLE(simd_shuffle, float, 6)
K3_SHUFFLE(simd_shuffle_xor, float, 7)
K3_SHUFFLE(simd_shuffle_down, float, 8)
K3_SHUFFLE(simd_shuffle_up, float, 9)
K3_SHUFFLE(simd_broadcast, float, 6)
#undef K3_SIMD
#undef K3_SHUFFLE

K3_INLINE float min(float a, float b) { return __builtin_fminf(a, b); }
K3_INLINE float max(float a, float b) { return __builtin_fmaxf(a, b); }
K3_INLINE int min(int a, int b) { return a < b ? a : b; }
K3_INLINE int max(int a, int b) { return a > b ? a : b; }
K3_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

namespace precise {
K3_INLINE float exp(float x) { return __builtin_expf(x); }
K3_INLINE float log(float x) { return __builtin_logf(x); }
K3_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
K3_INLINE float tanh(float x) { return __builtin_tanhf(x); }
}  // namespace precise
using precise::exp;
using precise::log;
using precise::sqrt;
using precise::tanh;
}  // namespace metal

using namespace metal;
