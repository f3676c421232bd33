// Attention over paged keys and values, tile by tile with a running softmax (Milakov and Gimelshein 2018, Dao et al. 2022).
//
// The query heads that share a KV head are lines of one matrix, as are a row's tokens: line = token * group + head. So a row
// that decodes is a matrix of few lines, a prefill chunk one of many, and both take the same way: for each tile of keys,
// scores = lines * keys, weights = exp(scores - highest so far), out += weights * values.
#include <cstdlib>
#include <limits>
#include <memory>

#include "kernels.h"
#include "tiles.h"

namespace LEVEL {
namespace {

constexpr int KEYS = 64;           // of a tile
constexpr int MOST_LINES = 192;    // of an item; what unpacking a tile of keys costs is shared by so many
constexpr int MAX_HEAD_DIM = 512;  // larger ones are refused before a program is recorded
constexpr int LINES_OF_LOAD = 16;  // reading and unpacking a key takes about as long as multiplying it with so many lines
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// Some lines of one row and KV head: what one thread does at a time.
struct Item {
  int64_t row;
  int64_t head;      // of keys
  int64_t token;     // of the first line
  int64_t position;  // of that token
  int phase;         // the first line's head in the group
  int lines;
  int64_t begin, end;  // positions of the keys that any of the lines sees
};

// A tile of keys, and where they and their values lie. Those that no line sees have no place in it, so they are never read;
// what is behind the last one points to zeros, since even what is multiplied with a weight of zero must be finite.
template <class T> struct Keys {
  int64_t begin = 0;  // position of the first
  int count = 0;
  const T* keys[KEYS];
  const T* values[KEYS];
};

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

Scratch& scratch() {
  struct Free {
    void operator()(void* memory) { std::free(memory); }
  };
  // On the heap, where only what a model's shape needs is ever touched.
  thread_local std::unique_ptr<Scratch, Free> memory(static_cast<Scratch*>(std::aligned_alloc(64, sizeof(Scratch))));
  return *memory;
}

// Scores become softcap * tanh(score / softcap). The error is absolute: a few units of 1e-7 * softcap.
vf capped(vf x, float softcap) {
  vf twice = min(x * (2.0f / softcap), splat(80.0f));
  return softcap - 2.0f * softcap / (exp(twice) + 1.0f);
}

// Queries of dtype Q; keys and values of dtype D, multiplied as words of E.
template <class E, class Q, class D> class Attention {
 public:
  Attention(const AttentionArgs& args, const Step& step)
      : a(args), step(step), s(scratch()), group(a.heads / a.kv_heads),
        width((a.head_dim + COLUMNS - 1) / COLUMNS * COLUMNS), steps(width / E::values) {}

  // The items that fall to this thread: all threads get about as much to do.
  void run(Share share) {
    int64_t total = 0, before = 0;
    each_item([&](const Item& item) { total += cost(item); });
    Item mine;
    bool any = false;
    each_item([&](const Item& item) {
      int64_t middle = before + cost(item) / 2;
      before += cost(item);
      if (middle * share.threads / total != share.thread) return;
      if (any) attend(mine, &item);
      mine = item;
      any = true;
    });
    if (any) attend(mine, nullptr);
  }

 private:
  typedef typename Q::type Query;
  typedef typename D::type Stored;
  const AttentionArgs& a;
  const Step& step;
  Scratch& s;
  const int group;
  const int width;  // head_dim rounded up; what is behind head_dim is zero
  const int steps;  // words of it

  static int64_t cost(const Item& item) { return (item.end - item.begin) * (item.lines + LINES_OF_LOAD); }

  template <class F> void each_item(F f) const {
    for (int64_t row = 0; row < step.rows; row++) {
      int64_t lines = step.counts[row] * group;
      for (int64_t first = 0; first < lines; first += MOST_LINES) {
        int64_t last = (first + MOST_LINES < lines ? first + MOST_LINES : lines) - 1;
        int64_t oldest = step.starts[row] + first / group, newest = step.starts[row] + last / group;
        int64_t begin = a.window > 0 && oldest >= a.window ? oldest + 1 - a.window : 0;
        int phase = int(first % group), count = int(last + 1 - first);
        Item item = {row, 0, step.first[row] + first / group, oldest, phase, count, begin, newest + 1};
        for (; item.head < a.kv_heads; item.head++) f(item);
      }
    }
  }

  // `next` is what the thread does afterwards, or null: its first keys are fetched ahead.
  void attend(const Item& item, const Item* next) {
    load_queries(item);
    for (int line = 0; line < item.lines; line++) s.highest[line] = LOWEST, s.sum[line] = vf{};
    Keys<Stored> tiles[2];
    locate(item, item.begin, tiles[0]);
    for (int now = 0;; now ^= 1) {
      Keys<Stored>&tile = tiles[now], &ahead = tiles[now ^ 1];
      int64_t end = tile.begin + tile.count;
      if (end < item.end) locate(item, end, ahead);
      else if (next) locate(*next, next->begin, ahead);
      add_keys(item, tile, end < item.end || next ? ahead : tile);
      if (end == item.end) break;
    }
    store_out(item);
  }

  void locate(const Item& item, int64_t begin, Keys<Stored>& tile) const {
    static const Stored zeros[MAX_HEAD_DIM] = {};
    const int64_t* page = step.tables + step.slots[item.row] * step.table_stride + begin / a.page_size;
    int64_t within = begin % a.page_size, stride = int64_t(a.kv_heads) * a.head_dim;
    tile.begin = begin;
    tile.count = int(item.end - begin < KEYS ? item.end - begin : KEYS);
    for (int i = 0; i < tile.count; page++, within = 0) {
      int64_t first = (*page * a.page_size + within) * stride + item.head * a.head_dim;
      auto *key = static_cast<const Stored*>(a.keys) + first, *value = static_cast<const Stored*>(a.values) + first;
      for (; within < a.page_size && i < tile.count; within++, i++, key += stride, value += stride)
        tile.keys[i] = key, tile.values[i] = value;
    }
    for (int i = tile.count; i < KEYS; i++) tile.keys[i] = tile.values[i] = zeros;
  }

  void load_queries(const Item& item) {
    for (int line = 0; line < item.lines; line++) {
      int64_t token = item.token + (item.phase + line) / group, head = item.head * group + (item.phase + line) % group;
      const Query* query = static_cast<const Query*>(a.queries) + (token * a.heads + head) * a.head_dim;
      for (int i = 0; i < width; i += W) E::put(s.queries + line * steps, i, part<Q>(query, i));
    }
  }

  void store_out(const Item& item) {
    for (int line = 0; line < item.lines; line++) {
      int64_t token = item.token + (item.phase + line) / group, head = item.head * group + (item.phase + line) % group;
      Query* to = static_cast<Query*>(a.out) + token * a.out_stride + head * a.head_dim;
      const float* out = s.out + line * width;
      float share = 1.0f / sum(s.sum[line]);
      int i = 0;
      for (; i + W <= a.head_dim; i += W) Q::store(to + i, load(out + i) * share);
      for (; i < a.head_dim; i++) to[i] = Q::put(out[i] * share);
    }
  }

  void add_keys(const Item& item, const Keys<Stored>& tile, const Keys<Stored>& ahead) {
    int columns = (tile.count + COLUMNS - 1) / COLUMNS * COLUMNS;
    // Lines before the first key see nothing of the tile; they are left out by whole tiles of AMX.
    int64_t unseeing = (tile.begin - item.position) * group - item.phase;
    int from = unseeing > 0 ? int(unseeing) / 16 * 16 : 0;
    Matrix scores = {s.scores + from * KEYS, KEYS};
    Matrix weights = {s.weights + from * (KEYS / E::values), KEYS / E::values};
    unpack_keys(tile, ahead, columns);
    multiply<E>({s.queries + from * steps, steps}, {s.keys, KEYS}, scores, item.lines - from, columns, steps, false);
    for (int line = from; line < item.lines; line++) weigh(item, tile, line, columns);
    unpack_values(tile, ahead, columns);
    bool add = tile.begin != item.begin;
    multiply<E>(weights, {s.values, width}, {s.out + from * width, width}, item.lines - from, width, columns / E::values, add);
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
        if constexpr (E::values == 1) store(to + word, words(line, word));
        else E::interleave(words(line, word), words(next, word), to + 2 * word);
      }
    }
  }
};

template <class E, class Q, class D> void attend(const AttentionArgs& a, const Step& step, Share share) {
  Attention<E, Q, D>(a, step).run(share);
}

}  // namespace

void attention(const AttentionArgs& a, const Step& step, Share share) {
#ifdef __AVX512BF16__
  if (a.query_dtype == BF16 && a.kv_dtype == BF16) {
#ifdef __AMX_BF16__
    configure_tiles();
#endif
    attend<Pairs, Float<BF16>, Float<BF16>>(a, step, share);
#ifdef __AMX_BF16__
    _tile_release();
#endif
    return;
  }
#endif
  with_dtype(a.query_dtype, [&](auto q) {
    with_dtype(a.kv_dtype, [&](auto d) { attend<Singles, decltype(q), decltype(d)>(a, step, share); });
  });
}

}  // namespace LEVEL
