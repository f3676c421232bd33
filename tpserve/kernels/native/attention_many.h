// Attention in bfloat16 for more than 16 lines, as of a prefill chunk, by the tiles of AMX, 16 lines after the other. Scores lie
// with a key a line and a query line a column, so that keys need no transposing, and the softmax runs down the columns without a
// sum or a maximum across a register. The sums lie like that too.
#pragma once

#ifdef __AMX_BF16__

#include <algorithm>

#include "amx.h"

namespace LEVEL {

class ManyLines {
 public:
  explicit ManyLines(const Items<uint16_t, uint16_t>& items)
      : items(items), a(items.a), s(scratch<Scratch>()), width((a.head_dim + 31) / 32 * 32), words(width / 2) {}

  // Queries to columns.
  void begin(const Item& item) {
    const uint16_t* lines[MOST_LINES];
    int first = int(item.position - item.begin);
    items.each_line(item, [&](int line, int token, int64_t head) {
      lines[line] = items.query(item, token, head);
      s.position[line / TILE][line % TILE] = first + token;
    });
    for (int g = 0; g * TILE < item.lines; g++) {
      int count = std::min(TILE, item.lines - g * TILE);
      for (int line = count; line < TILE; line++) s.position[g][line] = s.position[g][count - 1];
      s.softmax[g].begin();
      for (int word = 0; word < words; word += TILE) {
        vf square[TILE] = {};
        for (int line = 0; line < count; line++) square[line] = line_words(lines[g * TILE + line], word, a.head_dim);
        transpose(square);
        for (int i = 0; i < TILE; i++) store(s.queries + (g * words + word + i) * TILE, square[i]);
      }
    }
  }

  void add_keys(const Item& item, const Keys<uint16_t>& tile, const Keys<uint16_t>& ahead) {
    copy_keys(tile, ahead);
    unpack_values(tile, ahead);
    for (int g = 0; g * TILE < item.lines; g++) {
      int last = std::min(TILE, item.lines - g * TILE) - 1;
      if (s.position[g][last] < tile.begin - item.begin) continue;  // the group sees none of these keys
      score(g);
      vf factor = weigh(item, tile, g);
      float* out = s.out + g * width * TILE;
      bool add = tile.begin != item.begin;
      if (add && any(factor < 1.0f))
        for (int i = 0; i < width; i++) store(out + i * TILE, load(out + i * TILE) * factor);
      add_weighted(out, add);
    }
  }

  void store_out(const Item& item) {
    alignas(64) float lines[TILE][MAX_HEAD_DIM];
    items.each_line(item, [&](int line, int token, int64_t head) {
      int group = line / TILE, in = line % TILE;
      if (in == 0) to_lines(s.out + group * width * TILE, lines);
      float share = 1.0f / s.softmax[group].total[in];
      uint16_t* to = items.out(item, token, head);
      int i = 0;
      for (; i + W <= a.head_dim; i += W) store_bf16(to + i, load(lines[in] + i) * share);
      for (; i < a.head_dim; i++) to[i] = to_bf16(lines[in][i] * share);
    });
  }

 private:
  static constexpr int GROUPS = MOST_LINES / TILE;  // of query lines

  struct alignas(64) Scratch {
    float keys[KEYS * MAX_HEAD_DIM / 2];           // (keys, words)
    float queries[MOST_LINES * MAX_HEAD_DIM / 2];  // (groups, words, 16)
    float scores[KEYS * TILE];                     // (keys, 16) of a group
    float weights[KEYS / 2 * TILE];                // (pairs of keys, 16)
    float values[MAX_HEAD_DIM * KEYS / 2];         // (width, pairs of keys)
    float out[MOST_LINES * MAX_HEAD_DIM];          // (groups, width, 16)
    Softmax softmax[GROUPS];
    vi position[GROUPS];                           // of a line's token, since the item's first key
  };

  const Items<uint16_t, uint16_t>& items;
  const AttentionArgs& a;
  Scratch& s;
  const int width;  // head_dim rounded up; what is behind head_dim is zero
  const int words;  // of two values

  void copy_keys(const Keys<uint16_t>& tile, const Keys<uint16_t>& ahead) {
    for (int key = 0; key < KEYS; key++)
      for (int word = 0; word < words; word += W) {
        fetch(ahead.keys[key] + word * 2);
        store(s.keys + key * words + word, line_words(tile.keys[key], word, a.head_dim));
      }
  }

  // Scores of one group of lines. Each 16 keys have a sum of their own: a product takes long, but the next one begins soon.
  void score(int group) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const float *keys = s.keys, *queries = s.queries + group * words * TILE;
    long key_bytes = 4L * words;
    for (int word = 0; word < words; word += TILE, keys += TILE, queries += TILE * TILE) {
      _tile_loadd(4, queries, 4L * TILE);
      _tile_loadd(5, keys, key_bytes);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, keys + TILE * words, key_bytes);
      _tile_dpbf16ps(1, 6, 4);
      _tile_loadd(7, keys + 2 * TILE * words, key_bytes);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, keys + 3 * TILE * words, key_bytes);
      _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, s.scores, 4L * TILE);
    _tile_stored(1, s.scores + TILE * TILE, 4L * TILE);
    _tile_stored(2, s.scores + 2 * TILE * TILE, 4L * TILE);
    _tile_stored(3, s.scores + 3 * TILE * TILE, 4L * TILE);
  }

  // Scores to weights, relative to the highest score so far. Returns by what the sums before are to be multiplied.
  vf weigh(const Item& item, const Keys<uint16_t>& tile, int group) {
    vi newest = s.position[group] - int(tile.begin - item.begin);  // of the keys that a line sees
    newest = newest < tile.count ? newest : vi{} + (tile.count - 1);
    vi oldest = a.window > 0 ? s.position[group] - int(tile.begin - item.begin) - (a.window - 1) : vi{};
    if (a.softcap > 0 || any(newest < KEYS - 1) || any(oldest > 0)) hide(newest, oldest);
    vf most[4];
    for (int i = 0; i < 4; i++) most[i] = load(s.scores + i * TILE);
    for (int i = 4; i < KEYS; i++) most[i % 4] = max(most[i % 4], load(s.scores + i * TILE));
    vf high = max(max(max(most[0], most[1]), max(most[2], most[3])), s.softmax[group].highest);
    float scale = a.softcap > 0 ? 1.0f : a.scale;
    Softmax softmax = s.softmax[group];
    vf factor = softmax.raise(high, scale);
    for (int i = 0; i < KEYS; i += 2) {
      const float* scores = s.scores + i * TILE;
      vf first = softmax.weigh(load(scores), scale), second = softmax.weigh(load(scores + TILE), scale);
      store(s.weights + i / 2 * TILE, pairs(first, second));
    }
    s.softmax[group] = softmax;
    return factor;
  }

  void hide(vi newest, vi oldest) {
    for (int i = 0; i < KEYS; i++) {
      vf x = load(s.scores + i * TILE);
      if (a.softcap > 0) x = capped(x * a.scale, a.softcap);
      __m512i key = _mm512_set1_epi32(i);
      __mmask16 seen = _mm512_cmple_epi32_mask(key, (__m512i)newest) & _mm512_cmpge_epi32_mask(key, (__m512i)oldest);
      store(s.scores + i * TILE, (vf)_mm512_mask_blend_ps(seen, (__m512)splat(HIDDEN), (__m512)x));
    }
  }

  // To s.values: a line for each column of the values, of pairs of keys.
  void unpack_values(const Keys<uint16_t>& tile, const Keys<uint16_t>& ahead) {
    for (int column = 0; column < width; column += 2 * W)
      for (int half = 0; half < KEYS; half += 2 * TILE) {
        vf low[TILE], high[TILE];
        for (int i = 0; i < TILE; i++) {
          int key = half + 2 * i;
          fetch(ahead.values[key] + column);
          fetch(ahead.values[key + 1] + column);
          Columns both = columns(
              line_words(tile.values[key], column / 2, a.head_dim), line_words(tile.values[key + 1], column / 2, a.head_dim));
          low[i] = both.low, high[i] = both.high;
        }
        transpose(low);
        transpose(high);
        float* to = s.values + column * (KEYS / 2) + half / 2;
        for (int i = 0; i < TILE; i++) {
          store(to + column_of(i) * (KEYS / 2), low[i]);
          store(to + (column_of(i) + 4) * (KEYS / 2), high[i]);
        }
      }
  }

  // out (width, 16) += values (width, pairs) times weights (pairs, 16).
  void add_weighted(float* out, bool add) {
    _tile_loadd(6, s.weights, 4L * TILE);
    _tile_loadd(7, s.weights + TILE * TILE, 4L * TILE);
    int column = 0;
    for (; column + 4 * TILE <= width; column += 4 * TILE) add_columns<4>(out, column, add);
    if (column < width) add_columns<2>(out, column, add);
  }

  template <int T> void add_columns(float* out, int column, bool add) {
    constexpr long bytes = 4L * TILE, value_bytes = 4L * (KEYS / 2), values_of = TILE * KEYS / 2;
    out += column * TILE;
    const float* values = s.values + column * (KEYS / 2);
    if (add) {
      _tile_loadd(0, out, bytes);
      _tile_loadd(1, out + TILE * TILE, bytes);
      if (T == 4) _tile_loadd(2, out + 2 * TILE * TILE, bytes);
      if (T == 4) _tile_loadd(3, out + 3 * TILE * TILE, bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int half = 0; half < 2; half++, values += TILE) {
      _tile_loadd(4, values, value_bytes);
      if (half == 0) _tile_dpbf16ps(0, 4, 6);
      else _tile_dpbf16ps(0, 4, 7);
      _tile_loadd(5, values + values_of, value_bytes);
      if (half == 0) _tile_dpbf16ps(1, 5, 6);
      else _tile_dpbf16ps(1, 5, 7);
      if (T == 2) continue;
      _tile_loadd(4, values + 2 * values_of, value_bytes);
      if (half == 0) _tile_dpbf16ps(2, 4, 6);
      else _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, values + 3 * values_of, value_bytes);
      if (half == 0) _tile_dpbf16ps(3, 5, 6);
      else _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + TILE * TILE, bytes);
    if (T == 4) _tile_stored(2, out + 2 * TILE * TILE, bytes);
    if (T == 4) _tile_stored(3, out + 3 * TILE * TILE, bytes);
  }

  void to_lines(const float* out, float (&lines)[TILE][MAX_HEAD_DIM]) {
    for (int column = 0; column < width; column += TILE) {
      vf square[TILE];
      for (int i = 0; i < TILE; i++) square[i] = load(out + (column + i) * TILE);
      transpose(square);
      for (int i = 0; i < TILE; i++) store(lines[i] + column, square[i]);
    }
  }
};

}  // namespace LEVEL

#endif
