// Products of small tiles, as attention needs them: C (lines, columns) = A (lines, steps) * B (steps, columns), float32 sums.
//
// A and B consist of words of 32 bits: one float (`Singles`), or two bf16 that are adjacent in the summed dimension
// (`Pairs`). Word (step, column) of B lies at b[step * b_stride + column], so a step of B is a few whole vectors and a
// word of A is multiplied with all of them. This is also the layout that AMX takes.
#pragma once

#include "vec.h"

namespace LEVEL {

constexpr int COLUMNS = 32;  // a tile has a multiple of so many columns, and of so many values in the summed dimension

// Sums kept in registers: lines times vectors.
#if defined(__AVX512F__)
constexpr int LINES = 6, VECTORS = 4;
#else
constexpr int LINES = 6, VECTORS = 2;
#endif

struct Singles {
  static constexpr int values = 1;  // in a word
  static vf multiply_add(vf sum, float a, vf b) { return sum + a * b; }
  static void put(float* words, int index, vf v) { store(words + index, v); }
};

#ifdef __AVX512BF16__
struct Pairs {
  static constexpr int values = 2;
  static vf multiply_add(vf sum, float a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
  }
  static void put(float* words, int index, vf v) { store_bf16(reinterpret_cast<uint16_t*>(words) + index, v); }
  // Two lines of 2 * W values, to the words of their first W columns and to those of the others.
  static void interleave(vf first, vf second, float* words) {
    __m512i order;
    for (int i = 0; i < 2 * W; i++) reinterpret_cast<uint16_t*>(&order)[i] = i / 2 + i % 2 * 32;
    __m512i next = _mm512_add_epi16(order, _mm512_set1_epi16(W));
    _mm512_storeu_si512(words, _mm512_permutex2var_epi16((__m512i)first, order, (__m512i)second));
    _mm512_storeu_si512(words + W, _mm512_permutex2var_epi16((__m512i)first, next, (__m512i)second));
  }
};
#endif

struct Matrix {
  float* words;
  int stride;  // words from a line to the next
};

template <class E, int R, int V> void multiply_block(Matrix a, Matrix b, Matrix c, int steps, bool add) {
  vf sums[R][V] = {};
  for (int k = 0; k < steps; k++) {
    const float* line = b.words + k * b.stride;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = E::multiply_add(sums[r][v], a.words[r * a.stride + k], load(line + v * W));
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      float* out = c.words + r * c.stride + v * W;
      store(out, add ? load(out) + sums[r][v] : sums[r][v]);
    }
}

// R lines at a time, the rest with fewer.
template <class E, int R, int V> void multiply_lines(Matrix a, Matrix b, Matrix c, int lines, int steps, bool add) {
  for (; lines >= R; lines -= R) {
    multiply_block<E, R, V>(a, b, c, steps, add);
    a.words += R * a.stride;
    c.words += R * c.stride;
  }
  if constexpr (R > 1)
    if (lines > 0) multiply_lines<E, R - 1, V>(a, b, c, lines, steps, add);
}

#ifdef __AMX_BF16__
constexpr int TILE = 16;  // lines and words of a register

// Eight registers of 16 lines of 16 words: 0 to 3 for sums, 4 for A, 5 to 7 for B.
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

// 16 lines times 16 * T columns.
template <int T> void multiply_tile(Matrix a, Matrix b, Matrix c, int steps, bool add) {
  long a_bytes = 4L * a.stride, b_bytes = 4L * b.stride, c_bytes = 4L * c.stride;
  if (add) {
    _tile_loadd(0, c.words, c_bytes);
    _tile_loadd(1, c.words + TILE, c_bytes);
    if constexpr (T == 4) {
      _tile_loadd(2, c.words + 2 * TILE, c_bytes);
      _tile_loadd(3, c.words + 3 * TILE, c_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < steps; k += TILE) {
    const float* line = b.words + k * b.stride;
    _tile_loadd(4, a.words + k, a_bytes);
    _tile_loadd(5, line, b_bytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, line + TILE, b_bytes);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (T == 4) {
      _tile_loadd(7, line + 2 * TILE, b_bytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, line + 3 * TILE, b_bytes);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c.words, c_bytes);
  _tile_stored(1, c.words + TILE, c_bytes);
  if constexpr (T == 4) {
    _tile_stored(2, c.words + 2 * TILE, c_bytes);
    _tile_stored(3, c.words + 3 * TILE, c_bytes);
  }
}

#endif

inline Matrix at(Matrix m, int line, int column) { return {m.words + line * m.stride + column, m.stride}; }

// C is overwritten, or added to. With AMX, lines of A and C up to the next multiple of 16 are read and written as well: even
// for one line it takes less time than the vectors do.
template <class E> void multiply(Matrix a, Matrix b, Matrix c, int lines, int columns, int steps, bool add) {
#ifdef __AMX_BF16__
  if constexpr (E::values == 2) {
    for (int column = 0; column < columns; column += 4 * TILE)
      for (int line = 0; line < lines; line += TILE)
        if (columns - column >= 4 * TILE)
          multiply_tile<4>(at(a, line, 0), at(b, 0, column), at(c, line, column), steps, add);
        else
          multiply_tile<2>(at(a, line, 0), at(b, 0, column), at(c, line, column), steps, add);
    return;
  }
#endif
  int column = 0;
  for (; column + VECTORS * W <= columns; column += VECTORS * W)
    multiply_lines<E, LINES, VECTORS>(a, at(b, 0, column), at(c, 0, column), lines, steps, add);
  for (; column < columns; column += 2 * W)
    multiply_lines<E, LINES, 2>(a, at(b, 0, column), at(c, 0, column), lines, steps, add);
}

// A square of W words on a side: halves of ever smaller blocks change places.
inline void transpose(vf (&lines)[W]) {
#pragma GCC unroll 4
  for (int half = W / 2; half > 0; half /= 2) {
    vi low, high;
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
      low[i] = i & half ? W + i - half : i;
      high[i] = i & half ? W + i : i + half;
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
      if (i & half) continue;
      vf upper = lines[i], lower = lines[i + half];
      lines[i] = __builtin_shuffle(upper, lower, low);
      lines[i + half] = __builtin_shuffle(upper, lower, high);
    }
  }
}

inline float highest(vf v) {
#pragma GCC unroll 4
  for (int half = W / 2; half > 0; half /= 2) {
    vi turned;
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) turned[i] = i ^ half;
    v = max(v, __builtin_shuffle(v, turned));
  }
  return v[0];
}

}  // namespace LEVEL
