// Attention over paged keys and values, tile by tile with a running softmax (Milakov and Gimelshein 2018, Dao et al. 2022).
//
// For each tile of keys: scores = lines * keys, weights = exp(scores - highest so far), out += weights * values. Here the lines of
// scores are those of queries, for all levels and dtypes; bfloat16 with AMX has ways of its own.
#include "attention.h"
#include "attention_few.h"
#include "attention_many.h"
#include "matrix.h"

namespace LEVEL {
namespace {

// One thread's working memory.
struct alignas(64) Scratch {
  float queries[MOST_LINES * MAX_HEAD_DIM];
  float keys[MAX_HEAD_DIM * KEYS];
  float values[KEYS * MAX_HEAD_DIM];
  float scores[MOST_LINES * KEYS];
  float weights[MOST_LINES * KEYS];
  float out[MOST_LINES * MAX_HEAD_DIM];
  vf sum[MOST_LINES];  // of a line's weights
  float highest[MOST_LINES];
};

// Queries of dtype Q; keys and values of dtype D, multiplied as words of E.
template <class E, class Q, class D> class Attention {
 public:
  typedef typename Q::type Query;
  typedef typename D::type Stored;

  explicit Attention(const Items<Query, Stored>& items)
      : items(items), a(items.a), s(scratch<Scratch>()), group(items.group),
        width((a.head_dim + COLUMNS - 1) / COLUMNS * COLUMNS), steps(width / E::values) {}

  void begin(const Item& item) {
    load_queries(item);
    for (int line = 0; line < item.lines; line++) s.highest[line] = LOWEST, s.sum[line] = vf{};
  }

  void add_keys(const Item& item, const Keys<Stored>& tile, const Keys<Stored>& ahead) {
    int columns = (tile.count + COLUMNS - 1) / COLUMNS * COLUMNS;
    int64_t unseeing = (tile.begin - item.position) * group - item.phase;  // lines before the first key
    int from = unseeing > 0 ? int(unseeing) : 0;
    Matrix scores = {s.scores + from * KEYS, KEYS};
    Matrix weights = {s.weights + from * (KEYS / E::values), KEYS / E::values};
    unpack_keys(tile, ahead, columns);
    multiply<E>({s.queries + from * steps, steps}, {s.keys, KEYS}, scores, item.lines - from, columns, steps, false);
    for (int line = from; line < item.lines; line++) weigh(item, tile, line, columns);
    unpack_values(tile, ahead, columns);
    bool add = tile.begin != item.begin;
    multiply<E>(weights, {s.values, width}, {s.out + from * width, width}, item.lines - from, width, columns / E::values, add);
  }

  void store_out(const Item& item) {
    items.each_line(item, [&](int line, int token, int64_t head) {
      Query* to = items.out(item, token, head);
      const float* out = s.out + line * width;
      float share = 1.0f / sum(s.sum[line]);
      int i = 0;
      for (; i + W <= a.head_dim; i += W) Q::store(to + i, load(out + i) * share);
      for (; i < a.head_dim; i++) to[i] = Q::put(out[i] * share);
    });
  }

 private:
  const Items<Query, Stored>& items;
  const AttentionArgs& a;
  Scratch& s;
  const int group;
  const int width;  // head_dim rounded up; what is behind head_dim is zero
  const int steps;  // words of it

  void load_queries(const Item& item) {
    items.each_line(item, [&](int line, int token, int64_t head) {
      const Query* query = items.query(item, token, head);
      for (int i = 0; i < width; i += W) E::put(s.queries + line * steps, i, part<Q>(query, i));
    });
  }

  // Scores of one line to weights, relative to the highest score so far; what was summed before is brought down to it.
  void weigh(const Item& item, const Keys<Stored>& tile, int line, int columns) {
    int64_t position = item.position + (item.phase + line) / group;
    int64_t end = position + 1 - tile.begin, begin = a.window > 0 ? end - a.window : 0;  // columns that the line sees
    if (end > tile.count) end = tile.count;
    float* scores = s.scores + line * KEYS;
    vf most = splat(s.highest[line]);
    for (int i = 0; i < columns; i += W) {
      vf x = load(scores + i) * a.scale;
      if (a.softcap > 0) x = capped(x, a.softcap);
      if (begin > i || end < i + W) x = seen(x, int(begin) - i, int(end) - i);
      store(scores + i, x);
      most = max(most, x);
    }
    float high = highest(most);
    if (high > s.highest[line]) {
      vf factor = exp(splat(s.highest[line] - high));
      s.highest[line] = high;
      s.sum[line] *= factor;
      if (tile.begin != item.begin)
        for (float *out = s.out + line * width, *stop = out + width; out < stop; out += W) store(out, load(out) * factor);
    }
    for (int i = 0; i < columns; i += W) {
      vf weight = exp(load(scores + i) - high);
      s.sum[line] += weight;
      E::put(s.weights + line * (KEYS / E::values), i, weight);
    }
  }

  static vf seen(vf x, int begin, int end) {
    vi column;
    for (int i = 0; i < W; i++) column[i] = i;
    return (column >= begin) & (column < end) ? x : splat(HIDDEN);
  }

  // W values of a line of head_dim from the i-th on, zero behind it.
  template <class T> vf part(const typename T::type* line, int i) const {
    if (i + W <= a.head_dim) return T::load(line + i);
    vf out = {};
    for (int j = 0; i + j < a.head_dim; j++) out[j] = T::get(line[i + j]);
    return out;
  }

  // Whether W words from this one on all lie before head_dim.
  bool whole(int word) const { return (word + W) * E::values <= a.head_dim; }

  // Those words of a line.
  static vf whole_words(const Stored* line, int word) {
    if constexpr (E::values == 1) return D::load(line + word);
    typedef float loose __attribute__((vector_size(4 * W), aligned(sizeof(Stored)), may_alias));
    return *reinterpret_cast<const loose*>(line + word * E::values);
  }

  // The same with zeros from head_dim on.
  vf last_words(const Stored* line, int word) const {
    if constexpr (E::values == 1) return part<D>(line, word);
    Stored values[W * E::values] = {};
    int left = a.head_dim - word * E::values;
    if (left > 0) memcpy(values, line + word * E::values, left * sizeof(Stored));
    return whole_words(values, 0);
  }

  vf words(const Stored* line, int word) const { return whole(word) ? whole_words(line, word) : last_words(line, word); }

  // Into the second cache: the first one is full of the tile at hand.
  static void fetch(const Stored* place) { __builtin_prefetch(place, 0, 2); }

  // To s.keys (steps, KEYS). What is fetched ahead is spread over the work: the core can wait for a few lines only at once.
  void unpack_keys(const Keys<Stored>& tile, const Keys<Stored>& ahead, int columns) {
    for (int first = 0; first < columns; first += W)
      for (int word = 0; word < steps; word += W) {
        vf square[W];
        if (whole(word))
          for (int i = 0; i < W; i++) square[i] = whole_words(tile.keys[first + i], word);
        else
          for (int i = 0; i < W; i++) square[i] = last_words(tile.keys[first + i], word);
        for (int i = 0; i < W; i++) fetch(ahead.keys[first + i] + word * E::values);
        transpose(square);
        for (int i = 0; i < W; i++) store(s.keys + (word + i) * KEYS + first, square[i]);
      }
  }

  // To s.values (columns / E::values, width).
  void unpack_values(const Keys<Stored>& tile, const Keys<Stored>& ahead, int columns) {
    float* to = s.values;
    for (int key = 0; key < columns; key += E::values, to += width) {
      const Stored *line = tile.values[key], *next = tile.values[key + E::values - 1];
      for (int word = 0; word < steps; word += W) {
        for (int i = 0; i < E::values; i++) fetch(ahead.values[key + i] + word * E::values);
        vf columns[E::values];
        E::columns(words(line, word), words(next, word), columns);
        for (int v = 0; v < E::values; v++) store(to + word * E::values + v * W, columns[v]);
      }
    }
  }
};

template <class E, class Q, class D> void attend(const AttentionArgs& a, const Step& step, Share share) {
  Items<typename Q::type, typename D::type> items(a, step);
  Attention<E, Q, D> any(items);
  items.run(share, [&](const Item& item, const Item* next) { items.attend(any, item, next); });
}

#ifdef __AMX_BF16__
void attend_by_tiles(const AttentionArgs& a, const Step& step, Share share) {
  Items<uint16_t, uint16_t> items(a, step);
  ManyLines many(items);
  FewLines<1> up_to_16(items);
  FewLines<2> up_to_8(items);
  FewLines<4> up_to_4(items);
  configure_tiles();
  items.run(share, [&](const Item& item, const Item* next) {
    if (item.lines > 16) items.attend(many, item, next);
    else if (item.lines > 8) items.attend(up_to_16, item, next);
    else if (item.lines > 4) items.attend(up_to_8, item, next);
    else items.attend(up_to_4, item, next);
  });
  _tile_release();
}
#endif

}  // namespace

void attention(const AttentionArgs& a, const Step& step, Share share) {
#if defined(__AMX_BF16__)
  if (a.query_dtype == BF16 && a.kv_dtype == BF16) return attend_by_tiles(a, step, share);
#elif defined(__AVX512BF16__)
  if (a.query_dtype == BF16 && a.kv_dtype == BF16) return attend<Pairs, Float<BF16>, Float<BF16>>(a, step, share);
#endif
  with_dtype(a.query_dtype, [&](auto q) {
    with_dtype(a.kv_dtype, [&](auto d) { attend<Singles, decltype(q), decltype(d)>(a, step, share); });
  });
}

}  // namespace LEVEL
