// What both forms of attention share: how the work is cut up, and where keys and values lie.
//
// The query heads that share a KV head are lines of one matrix, as are a row's tokens: line = token * group + head. So a row
// that decodes is a matrix of few lines, a prefill chunk one of many.
#pragma once

#include <cstdlib>
#include <limits>
#include <memory>

#include "kernels.h"
#include "vec.h"

namespace LEVEL {

constexpr int KEYS = 64;           // of a tile
constexpr int MOST_LINES = 192;    // of an item; what unpacking a tile of keys costs is shared by so many
constexpr int MAX_HEAD_DIM = 512;  // larger ones are refused before a program is recorded
constexpr int LINES_OF_LOAD = 16;  // reading and unpacking a key takes about as long as multiplying it with so many lines
constexpr float LOWEST = std::numeric_limits<float>::lowest() / 1024;  // finite in any unit
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// Some lines of one row and KV head: what one thread does at a time.
struct Item {
  int64_t row;
  int64_t head;      // of keys
  int64_t token;     // of the first line
  int64_t position;  // of that token
  int phase;         // the first line's head in the group
  int lines;
  int64_t seen, end;   // positions of the keys that any of the lines sees
  int64_t begin;       // of the first tile: not later than `seen`, and the same whatever other lines there are
};

// A tile of keys, and where they and their values lie. Before the first that any line sees, and behind the last one, values are
// zeros, since even what is hidden and multiplied with a weight of next to nothing must be finite. So are keys behind the last.
template <class Stored> struct Keys {
  int64_t begin = 0;  // position of the first
  int count = 0;
  const Stored* keys[KEYS];
  const Stored* values[KEYS];
};

// Each thread's own working memory of a kind: on the heap, where only what a model's shape needs is ever touched.
template <class Scratch> Scratch& scratch() {
  struct Free {
    void operator()(void* memory) { std::free(memory); }
  };
  thread_local std::unique_ptr<Scratch, Free> memory(static_cast<Scratch*>(std::aligned_alloc(64, sizeof(Scratch))));
  return *memory;
}

// Scores become softcap * tanh(score / softcap). The error is absolute: a few units of 1e-7 * softcap.
inline vf capped(vf x, float softcap) {
  vf twice = min(splat(80.0f), x * (2.0f / softcap));  // in this order NaN stays NaN
  return softcap - 2.0f * softcap / (exp(twice) + 1.0f);
}

template <class Query, class Stored> class Items {
 public:
  Items(const AttentionArgs& args, const Step& step) : a(args), step(step), group(args.heads / args.kv_heads) {}

  // Calls attend(item, next) for those that fall to this thread; all threads get about as much to do. `next` is what the
  // thread does afterwards, or null.
  template <class F> void run(Share share, F attend) const {
    int64_t total = 0, before = 0;
    each([&](const Item& item) { total += cost(item); });
    Item mine;
    bool any = false;
    each([&](const Item& item) {
      int64_t middle = before + cost(item) / 2;
      before += cost(item);
      if (middle * share.threads / total != share.thread) return;
      if (any) attend(mine, &item);
      mine = item;
      any = true;
    });
    if (any) attend(mine, nullptr);
  }

  // One item by a way to compute it: `add_keys` for each tile of its keys. `ahead` is the tile to fetch meanwhile.
  template <class Way> void attend(Way& way, const Item& item, const Item* next) const {
    way.begin(item);
    Keys<Stored> tiles[2];
    locate(item, item.begin, tiles[0]);
    for (int now = 0;; now ^= 1) {
      Keys<Stored>&tile = tiles[now], &ahead = tiles[now ^ 1];
      int64_t end = tile.begin + tile.count;
      if (end < item.end) locate(item, end, ahead);
      else if (next) locate(*next, next->begin, ahead);
      way.add_keys(item, tile, end < item.end || next ? ahead : tile);
      if (end == item.end) break;
    }
    way.store_out(item);
  }

  // Calls f(line, token of the row since the item's first, query head) for each line.
  template <class F> void each_line(const Item& item, F f) const {
    int64_t first = item.head * group;
    for (int line = 0, token = 0, head = item.phase; line < item.lines; line++) {
      f(line, token, first + head);
      if (++head == group) head = 0, token++;
    }
  }
  const Query* query(const Item& item, int token, int64_t head) const {
    return static_cast<const Query*>(a.queries) + ((item.token + token) * a.heads + head) * a.head_dim;
  }
  Query* out(const Item& item, int token, int64_t head) const {
    return static_cast<Query*>(a.out) + (item.token + token) * a.out_stride + head * a.head_dim;
  }

  const AttentionArgs& a;
  const Step& step;
  const int group;  // query heads of a KV head

 private:
  static int64_t cost(const Item& item) { return (item.end - item.begin) * (item.lines + LINES_OF_LOAD); }

  template <class F> void each(F f) const {
    for (int64_t row = 0; row < step.rows; row++) {
      int64_t lines = step.counts[row] * group;
      for (int64_t first = 0; first < lines; first += MOST_LINES) {
        int64_t last = (first + MOST_LINES < lines ? first + MOST_LINES : lines) - 1;
        int64_t oldest = step.starts[row] + first / group, newest = step.starts[row] + last / group;
        int64_t seen = a.window > 0 && oldest >= a.window ? oldest + 1 - a.window : 0;
        int phase = int(first % group), count = int(last + 1 - first);
        Item item = {row, 0, step.first[row] + first / group, oldest, phase, count, seen, newest + 1, seen / KEYS * KEYS};
        for (; item.head < a.kv_heads; item.head++) f(item);
      }
    }
  }

  void locate(const Item& item, int64_t begin, Keys<Stored>& tile) const {
    static const Stored zeros[MAX_HEAD_DIM] = {};
    const int64_t* page = step.tables + step.slots[item.row] * step.table_stride + begin / a.page_size;
    int64_t within = begin % a.page_size;
    tile.begin = begin;
    tile.count = int(item.end - begin < KEYS ? item.end - begin : KEYS);
    for (int i = 0; i < tile.count; page++, within = 0) {
      int64_t first = ((*page * a.kv_heads + item.head) * a.page_size + within) * a.head_dim;
      auto *key = static_cast<const Stored*>(a.keys) + first, *value = static_cast<const Stored*>(a.values) + first;
      for (; within < a.page_size && i < tile.count; within++, i++, key += a.head_dim, value += a.head_dim)
        tile.keys[i] = key, tile.values[i] = value;
    }
    for (int i = tile.count; i < KEYS; i++) tile.keys[i] = tile.values[i] = zeros;
    for (int i = 0; i < item.seen - begin; i++) tile.values[i] = zeros;
  }
};

}  // namespace LEVEL
