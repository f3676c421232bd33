// AMX: its registers, and what both ways of attention by it need. Empty at levels that do not have it.
#pragma once

#ifdef __AMX_BF16__

#include "attention.h"
#include "matrix.h"

namespace LEVEL {

constexpr int TILE = 16;  // lines and words of a register

// Eight registers of 16 words a line: 0 to 5 of so many lines, 6 and 7 of 16.
inline void configure_tiles(int lines = TILE) {
  struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t lines[16] = {};
  } config;
  for (int i = 0; i < 8; i++) config.lines[i] = i < 6 ? lines : TILE;
  asm volatile("ldtilecfg %0" : : "m"(config));  // GCC's intrinsic does not say that it reads all of it
}

// 0, 1, ... 15
inline vi places() {
  vi out;
  for (int i = 0; i < W; i++) out[i] = i;
  return out;
}

inline bool any(vi mask) { return _mm512_movepi32_mask((__m512i)mask); }

// W words of a line of bf16 from this one on, zero behind its `size` values.
inline vf line_words(const uint16_t* line, int word, int size) {
  int left = size - word * 2;
  if (left >= 2 * W) return (vf)_mm512_loadu_si512(line + word * 2);
  return left <= 0 ? vf{} : (vf)_mm512_maskz_loadu_epi16((1u << left) - 1, line + word * 2);
}

// Two lines of 32 values to words of a column. The columns are then in this order: those of `low`, which are the first four of
// each eight, and the others.
struct Columns {
  vf low, high;
};
inline Columns columns(vf first, vf second) {
  return {(vf)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second),
          (vf)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second)};
}
constexpr int column_of(int place) { return place / 4 * 8 + place % 4; }  // of `low`; 4 further in `high`

// Words of a value of each, rounded to bfloat16 (a tie goes up, which takes less than to even).
inline vf pairs(vf first, vf second) {
  vi half = vi{} + 0x8000, low = (((vi)first + half) >> 16) & 0xffff;
  return (vf)((((vi)second + half) & int(0xffff0000)) | low);
}

// 2 ** x, within 8e-5, which is less than what rounding to bfloat16 does. Far below it stays at 2 ** -125: beside the highest
// score's 1 that is nothing, and smaller numbers take the processor a detour. The polynomial is the one of least greatest
// relative error on [0, 1).
inline vf exp2(vf x) {
  x = max(splat(-125.0f), x);  // in this order NaN stays NaN
  vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  vf p = ((0.07802452f * f + 0.22606718f) * f + 0.69583352f) * f + 0.99992522f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// A running softmax of 16 columns.
struct Softmax {
  vf highest;  // score so far
  vf total;    // of weights relative to it

  void begin() { highest = splat(LOWEST), total = vf{}; }

  // The highest may be this one now. Returns by what the sums before are to be multiplied; not by `exp2`, since its errors
  // would add up over the tiles, and where the highest stays nothing may change.
  vf raise(vf high, float scale) {
    vf factor = exp((highest - high) * scale);
    highest = high;
    total *= factor;
    return factor;
  }
  vf weigh(vf score, float scale) {
    float unit = scale * 1.44269504f;
    vf weight = exp2(score * unit - highest * unit);
    total += weight;
    return weight;
  }
};

// Into the second cache: the first one is full of the tile at hand.
inline void fetch(const uint16_t* place) { __builtin_prefetch(place, 0, 2); }

}  // namespace LEVEL

#endif
