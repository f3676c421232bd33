// Attention in bfloat16 for up to 16 lines, as of a row that decodes, by the tiles of AMX.
//
// Scores lie with a key a line of a tile and a query line a column, so that keys are read from where they are. A tile has 16
// columns; with 8 lines or 4 each has a column for every second or fourth 16 keys, so that nothing is computed for columns that
// no line has: column = line * PARTS + part.
#pragma once

#ifdef __AMX_BF16__

#include "amx.h"

namespace LEVEL {

template <int PARTS> class FewLines {
 public:
  explicit FewLines(const Items<uint16_t, uint16_t>& items)
      : items(items), a(items.a), s(scratch<Scratch>()), width((a.head_dim + 31) / 32 * 32), words(width / 2) {}

  void begin(const Item& item) {
    const uint16_t* lines[LINES];
    int first = int(item.position - item.begin);
    s.position = vi{} + (first + (item.phase + item.lines - 1) / items.group);  // columns of no line are like the last
    items.each_line(item, [&](int line, int token, int64_t head) {
      lines[line] = items.query(item, token, head);
      for (int part = 0; part < PARTS; part++) s.position[line * PARTS + part] = first + token;
    });
    s.softmax.begin();
    for (int word = 0; word < words; word += TILE) {
      vf square[TILE] = {};
      for (int line = 0; line < item.lines; line++) square[line * PARTS] = line_words(lines[line], word, a.head_dim);
      transpose(square);
      for (int part = 0; part < PARTS; part++)
        for (int i = 0; i < TILE; i++) store(s.queries + (part * words + word + i) * TILE, moved(square[i], part));
    }
  }

  void add_keys(const Item& item, const Keys<uint16_t>& tile, const Keys<uint16_t>& ahead) {
    Ahead next = {ahead, words};
    score(tile, next);
    unpack_values(tile, next);  // while the products are on their way
    vf factor = weigh(tile, tile.begin - item.begin, next);
    bool add = tile.begin != item.begin;
    if (add && any(factor < 1.0f))
      for (int line = 0; line < item.lines; line++)
        for (float *out = s.out + line * width, *end = out + width; out < end; out += W)
          store(out, load(out) * factor[line * PARTS]);
    for (int column = 0; column < width; column += 2 * TILE) add_weighted(column, add);
  }

  void store_out(const Item& item) {
    vi first, second;
    for (int i = 0; i < W; i++) first[i] = i / 8 * 4 + i % 4 + (i & 4 ? W : 0), second[i] = first[i] + 8;
    vf total = s.softmax.total;
    for (int half = 1; half < PARTS; half *= 2) total += __builtin_shuffle(total, places() ^ half);
    items.each_line(item, [&](int line, int token, int64_t head) {
      float* out = s.out + line * width;
      for (int column = 0; column < width; column += 2 * W) {
        vf low = load(out + column), high = load(out + column + W);
        store(out + column, __builtin_shuffle(low, high, first));
        store(out + column + W, __builtin_shuffle(low, high, second));
      }
      float share = 1.0f / total[line * PARTS];
      uint16_t* to = items.out(item, token, head);
      int i = 0;
      for (; i + W <= a.head_dim; i += W) store_bf16(to + i, load(out + i) * share);
      for (; i < a.head_dim; i++) to[i] = to_bf16(out[i] * share);
    });
  }

 private:
  static constexpr int LINES = TILE / PARTS;
  static constexpr int SCORES = KEYS / PARTS;  // lines of scores

  struct alignas(64) Scratch {
    float queries[PARTS * TILE * MAX_HEAD_DIM / 2];  // (parts, words, 16)
    float keys[KEYS * MAX_HEAD_DIM / 2];             // (keys, words), where they cannot be read from where they are
    float scores[KEYS * TILE];                       // (keys, 16), each part's keys in its columns; then (SCORES, 16)
    float weights[TILE * KEYS / 2];                  // (lines, pairs of keys)
    float values[KEYS / 2 * MAX_HEAD_DIM];           // (pairs of keys, width)
    float out[TILE * MAX_HEAD_DIM];                  // (lines, width), both with the columns of each 32 as `columns` leaves them
    Softmax softmax;
    vi position;  // of a column's token, since the item's first key
  };

  const Items<uint16_t, uint16_t>& items;
  const AttentionArgs& a;
  Scratch& s;
  const int width;  // head_dim rounded up; what is behind head_dim is zero
  const int words;  // of two values

  // What comes next is fetched at an even pace: the core can wait for few lines at once, and then for nothing else. It waits for
  // fewer where the hardware prefetcher has seen enough of 4 KiB of memory to ask for the rest, for which that needs time: so
  // from several places in turn, which are pages of their own if they have 16 tokens.
  struct Ahead {
    const Keys<uint16_t>& tile;
    int size, key = 0, word = 0;
    bool values = false;

    void fetch(int count) {
      for (int i = 0; i < count; i++) {
        LEVEL::fetch((values ? tile.values : tile.keys)[key] + word * 2);
        if (values && (key += TILE) >= KEYS) {
          key -= KEYS;
          if ((word += W) == size) word = 0, key++;
        }
        values = !values;
      }
    }
  };

  static vf moved(vf v, int columns) {
    vi from = places() - columns;
    return __builtin_shuffle(v, vf{}, from < 0 ? vi{} + W : from);
  }

  // --- scores ---

  void score(const Keys<uint16_t>& tile, Ahead& ahead) {
    const uint16_t* keys[4];
    int64_t strides[4];  // bytes
    bool in_place = a.page_size % TILE == 0 && a.head_dim % 32 == 0;
    if (!in_place) copy_keys(tile);
    for (int i = 0; i < 4; i++) {
      // The others of the last key's 16 are such as no line sees; behind those are zeros.
      keys[i] = in_place ? tile.keys[i * TILE] : reinterpret_cast<const uint16_t*>(s.keys + i * TILE * words);
      strides[i] = !in_place ? 4L * words : i * TILE < tile.count ? 2L * a.head_dim : 0;
    }
    multiply(keys, strides, ahead);
  }

  void copy_keys(const Keys<uint16_t>& tile) {
    for (int key = 0; key < KEYS; key++)
      for (int word = 0; word < words; word += W) store(s.keys + key * words + word, line_words(tile.keys[key], word, a.head_dim));
  }

  // Each 16 keys have a sum of their own: a product takes long, but the next one begins soon.
  void multiply(const uint16_t* const (&keys)[4], const int64_t (&strides)[4], Ahead& ahead) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const float* queries = s.queries;
    const int part = words * TILE;
    for (int word = 0; word < words; word += TILE, queries += TILE * TILE) {
      _tile_loadd(4, queries, 4L * TILE);
      _tile_loadd(5, keys[0] + word * 2, strides[0]);
      _tile_dpbf16ps(0, 5, 4);
      if (PARTS > 1) _tile_loadd(4, queries + part, 4L * TILE);
      ahead.fetch(8);
      _tile_loadd(6, keys[1] + word * 2, strides[1]);
      _tile_dpbf16ps(1, 6, 4);
      if (PARTS > 1) _tile_loadd(4, queries + 2 % PARTS * part, 4L * TILE);
      _tile_loadd(7, keys[2] + word * 2, strides[2]);
      _tile_dpbf16ps(2, 7, 4);
      if (PARTS > 1) _tile_loadd(4, queries + 3 % PARTS * part, 4L * TILE);
      ahead.fetch(8);
      _tile_loadd(5, keys[3] + word * 2, strides[3]);
      _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, s.scores, 4L * TILE);
    _tile_stored(1, s.scores + TILE * TILE, 4L * TILE);
    _tile_stored(2, s.scores + 2 * TILE * TILE, 4L * TILE);
    _tile_stored(3, s.scores + 3 * TILE * TILE, 4L * TILE);
  }

  // --- weights ---

  // Scores to weights, relative to the highest score so far. Returns by what the sums before are to be multiplied.
  vf weigh(const Keys<uint16_t>& tile, int64_t before, Ahead& ahead) {
    vi newest = s.position - int(before);  // of the keys that a column's line sees
    vi oldest = a.window > 0 ? newest - (a.window - 1) : vi{};
    newest = newest < tile.count ? newest : vi{} + (tile.count - 1);
    bool hidden = any(newest < KEYS - 1) || any(oldest > 0);
    vi own = places() & (PARTS - 1), key = own * TILE;
    vf high = s.softmax.highest;
    for (int i = 0; i < SCORES; i++) {
      const float* scores = s.scores + (i / TILE * PARTS * TILE + i % TILE) * TILE;
      vf x = load(scores);
      for (int part = 1; part < PARTS; part++) x = own == part ? load(scores + part * TILE * TILE) : x;
      if (a.softcap > 0) x = capped(x * a.scale, a.softcap);
      if (hidden) {
        vi at = key + (i / TILE * PARTS * TILE + i % TILE);
        x = (at <= newest) & (at >= oldest) ? x : splat(HIDDEN);
      }
      ahead.fetch(PARTS * words / W / 2);
      store(s.scores + i * TILE, x);
      high = max(high, x);
    }
    for (int half = 1; half < PARTS; half *= 2) high = max(high, __builtin_shuffle(high, places() ^ half));
    return weigh(high, ahead);
  }

  vf weigh(vf high, Ahead& ahead) {
    float scale = a.softcap > 0 ? 1.0f : a.scale;
    Softmax softmax = s.softmax;
    vf factor = softmax.raise(high, scale);
    for (int half = 0; half < 2; half++) {  // of the pairs
      vf pair[LINES];
      for (int i = 0; i < LINES; i++) {
        const float* scores = s.scores + (half * LINES + i) * 2 * TILE;
        vf first = softmax.weigh(load(scores), scale), second = softmax.weigh(load(scores + TILE), scale);
        pair[i] = pairs(first, second);
        ahead.fetch(PARTS * words / W / 2);
      }
      transpose<PARTS>(pair);
      for (int i = 0; i < LINES; i++) store(s.weights + i * (KEYS / 2) + half * TILE, pair[i]);
    }
    s.softmax = softmax;
    return factor;
  }

  // --- sums ---

  // In the order that pairs have in `weights`.
  void unpack_values(const Keys<uint16_t>& tile, Ahead& ahead) {
    for (int pair = 0; pair < KEYS / 2; pair++) {
      int line = pair / PARTS, part = pair % PARTS, key = (line / 8 * PARTS + part) * TILE + line % 8 * 2;
      for (int word = 0; word < words; word += W) {
        ahead.fetch(2);
        Columns both = columns(line_words(tile.values[key], word, a.head_dim), line_words(tile.values[key + 1], word, a.head_dim));
        store(s.values + pair * width + word * 2, both.low);
        store(s.values + pair * width + word * 2 + W, both.high);
      }
    }
  }

  void add_weighted(int column, bool add) {
    float* out = s.out + column;
    const float* values = s.values + column;
    const long line = 4L * width;
    if (add) {
      _tile_loadd(0, out, line);
      _tile_loadd(1, out + TILE, line);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    _tile_loadd(4, s.weights, 4L * (KEYS / 2));
    _tile_loadd(5, values, line);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, values + TILE, line);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, s.weights + TILE, 4L * (KEYS / 2));
    _tile_loadd(5, values + TILE * width, line);
    _tile_dpbf16ps(0, 7, 5);
    _tile_loadd(6, values + TILE * width + TILE, line);
    _tile_dpbf16ps(1, 7, 6);
    _tile_stored(0, out, line);
    _tile_stored(1, out + TILE, line);
  }
};

}  // namespace LEVEL

#endif
