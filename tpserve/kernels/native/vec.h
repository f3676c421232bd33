// Vectors of floats as wide as the level's registers, by the compiler's own vector types: one source for every level.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace LEVEL {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef float vf_unaligned __attribute__((vector_size(4 * W), aligned(4)));
typedef uint16_t vh_unaligned __attribute__((vector_size(2 * W), aligned(2)));

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
inline vf splat(float x) { return x - vf{}; }

inline float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)  // GCC 12 splits the general form in two
  return (vf)((vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))) << 16);
#else
  vh h = *reinterpret_cast<const vh_unaligned*>(p);
  return (vf)(__builtin_convertvector(h, vi) << 16);
#endif
}

inline void store_bf16(uint16_t* p, vf v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  vi bits = (vi)v;
  vi rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vi nan = (bits >> 16) | 0x40;
  vi chosen = v == v ? rounded : nan;
  *reinterpret_cast<vh_unaligned*>(p) = __builtin_convertvector(chosen & 0xffff, vh);
#endif
}

#if defined(__F16C__)
inline float from_f16(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
// Via powers of two, which handle the numbers below the normal ones as well; the largest exponent stays the largest.
inline float from_f16(uint16_t x) {
  uint32_t sign = uint32_t(x & 0x8000) << 16, rest = uint32_t(x & 0x7fff) << 13;
  float scaled;
  if ((x & 0x7c00) == 0x7c00) {
    rest |= 0x7f800000;
    memcpy(&scaled, &rest, 4);
  } else {
    memcpy(&scaled, &rest, 4);
    scaled *= 0x1p112f;
  }
  uint32_t bits;
  memcpy(&bits, &scaled, 4);
  bits |= sign;
  memcpy(&scaled, &bits, 4);
  return scaled;
}
inline uint16_t to_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint16_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds beyond 65504
  if (bits < 0x38800000) {                       // below the normal ones: units of 2**-24
    float absolute;
    memcpy(&absolute, &bits, 4);
    return sign | uint16_t(std::nearbyint(absolute * 0x1p24f));
  }
  return sign | uint16_t((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13);
}
#endif

inline vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf out;
  for (int i = 0; i < W; i++) out[i] = from_f16(p[i]);
  return out;
#endif
}

inline void store_f16(uint16_t* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; i++) p[i] = to_f16(v[i]);
#endif
}

// Storage of any dtype, read and written as floats: `Float<BF16>::load(p)`.
template <int DTYPE> struct Float;
template <> struct Float<0> {
  typedef float type;
  static float get(float x) { return x; }
  static float put(float x) { return x; }
  static vf load(const float* p) { return LEVEL::load(p); }
  static void store(float* p, vf v) { LEVEL::store(p, v); }
};
template <> struct Float<1> {
  typedef uint16_t type;
  static float get(uint16_t x) { return from_bf16(x); }
  static uint16_t put(float x) { return to_bf16(x); }
  static vf load(const uint16_t* p) { return load_bf16(p); }
  static void store(uint16_t* p, vf v) { store_bf16(p, v); }
};
template <> struct Float<2> {
  typedef uint16_t type;
  static float get(uint16_t x) { return from_f16(x); }
  static uint16_t put(float x) { return to_f16(x); }
  static vf load(const uint16_t* p) { return load_f16(p); }
  static void store(uint16_t* p, vf v) { store_f16(p, v); }
};

// Calls f with the Float of the dtype that has this number: one switch for all kernels.
template <class F> inline void with_dtype(int dtype, F f) {
  switch (dtype) {
    case 0: return f(Float<0>{});
    case 1: return f(Float<1>{});
    default: return f(Float<2>{});
  }
}

inline float sum(vf v) {
  float total = 0;
  for (int i = 0; i < W; i++) total += v[i];
  return total;
}

inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }

// exp to about 1 unit in the last place, for x <= 88; 0 below -87; NaN of NaN. Cephes' polynomial on the remainder of ln 2.
inline vf exp(vf x) {
  vf clamped = x < -87.3f ? splat(-87.3f) : x;
  vf n = clamped * 1.44269504f + 12582912.0f;  // the magic number rounds to a whole one
  vi whole = (vi)n - 0x4b400000;
  n -= 12582912.0f;
  vf r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vf out = p * (vf)((whole + 127) << 23);
  return x < -87.3f ? vf{} : out;
}

}  // namespace LEVEL
