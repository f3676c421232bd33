// Products of small tiles, as attention needs them: C (lines, columns) = A (lines, steps) * B (steps, columns), float32 sums.
//
// A and B consist of words of 32 bits: one float (`Singles`), or two bf16 that are adjacent in the summed dimension
// (`Pairs`). Word (step, column) of B lies at b[step * b_stride + column], so a step of B is a few whole vectors and a
// word of A is multiplied with all of them.
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
  static vf multiply_add(vf sum, vf a, vf b) { return sum + a * b; }
  static void columns(vf line, vf, vf (&words)[1]) { words[0] = line; }
  static void put(float* words, int index, vf v) { store(words + index, v); }
};

#ifdef __AVX512BF16__
struct Pairs {
  static constexpr int values = 2;
  static vf multiply_add(vf sum, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static void put(float* words, int index, vf v) { store_bf16(reinterpret_cast<uint16_t*>(words) + index, v); }
  // Two lines of 2 * W values, to the words of their first W columns and to those of the others.
  static void columns(vf first, vf second, vf (&words)[2]) {
    __m512i order;
    for (int i = 0; i < 2 * W; i++) reinterpret_cast<uint16_t*>(&order)[i] = i / 2 + i % 2 * 32;
    __m512i next = _mm512_add_epi16(order, _mm512_set1_epi16(W));
    words[0] = (vf)_mm512_permutex2var_epi16((__m512i)first, order, (__m512i)second);
    words[1] = (vf)_mm512_permutex2var_epi16((__m512i)first, next, (__m512i)second);
  }
};
#endif

// One word in every place. Not `splat`: a pair of bf16 may look like a NaN that arithmetic would change.
inline vf splat_word(float word) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(word);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(word);
#else
  return splat(word);
#endif
}

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
      for (int v = 0; v < V; v++) sums[r][v] = E::multiply_add(sums[r][v], splat_word(a.words[r * a.stride + k]), load(line + v * W));
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

inline Matrix at(Matrix m, int line, int column) { return {m.words + line * m.stride + column, m.stride}; }

// C is overwritten, or added to.
template <class E> void multiply(Matrix a, Matrix b, Matrix c, int lines, int columns, int steps, bool add) {
  int column = 0;
  for (; column + VECTORS * W <= columns; column += VECTORS * W)
    multiply_lines<E, LINES, VECTORS>(a, at(b, 0, column), at(c, 0, column), lines, steps, add);
  for (; column < columns; column += 2 * W)
    multiply_lines<E, LINES, 2>(a, at(b, 0, column), at(c, 0, column), lines, steps, add);
}

// W / BLOCK lines of W words, as a square of blocks of so many adjacent words: ever smaller parts change places.
template <int BLOCK = 1> inline void transpose(vf (&lines)[W / BLOCK]) {
#pragma GCC unroll 4
  for (int half = W / 2; half >= BLOCK; half /= 2) {
    vi low, high;
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
      low[i] = i & half ? W + i - half : i;
      high[i] = i & half ? W + i : i + half;
    }
#pragma GCC unroll 16
    for (int i = 0; i < W / BLOCK; i++) {
      if (i & half / BLOCK) continue;
      vf upper = lines[i], lower = lines[i + half / BLOCK];
      lines[i] = __builtin_shuffle(upper, lower, low);
      lines[i + half / BLOCK] = __builtin_shuffle(upper, lower, high);
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
