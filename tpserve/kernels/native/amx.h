// What both ways of attention by the tiles of AMX need. Only in files of a level that has them.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace LEVEL {

constexpr int TILE = 16;  // lines and words of a register

// Eight registers of 16 lines of 16 words: 0 to 3 for sums.
inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t lines[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.lines[i] = TILE;
  _tile_loadconfig(&config);
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

// Into the second cache: the first one is full of the tile at hand.
inline void fetch(const uint16_t* place) { __builtin_prefetch(place, 0, 2); }

}  // namespace LEVEL
