// Products with weights. One packed layout a dtype, the same at every level:
//
//   The n outputs (lines of the weight) are cut into blocks of 16; k is rounded up to a multiple of 32; what is added is
//   zero. BF16: [block][k / 2][16][2], neighbours in k as pairs, as `vdpbf16ps` and the tiles of AMX read them.
//   F16 and F32: [block][k][16]. Of a gated weight, each half is cut into blocks by itself, and they alternate.
//
// An output is one float32 sum in the order of k, whatever n, the other rows and the number of threads are: a result depends
// on the level, and not on the batch or on how the outputs are split over ranks. (Within 2 neighbours, with AMX within 32,
// the order is the instruction's. These instructions take numbers below the normal ones as zero.)
//
// Few rows are bound by memory: the weights are read once, in order, and fetched ahead. With many, two blocks stay in the
// nearest caches while all rows pass by, and the next two are fetched meanwhile.
#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "kernels.h"
#include "vec.h"

namespace LEVEL {
namespace {

constexpr int BLOCK = 16;                // outputs
constexpr int DEPTH = 32;                // of k, a step
constexpr int V = BLOCK / W;             // registers of a block
constexpr int GROUP = 32;                // rows that a kernel may be given
constexpr int64_t AHEAD = 2;             // steps between what is used and what is fetched
constexpr int64_t STREAMS = 8;           // parts of the next blocks that are fetched in turn
constexpr int64_t CACHED = 1024 * 1024;  // bytes of x that stay in the second cache while the weights pass by

int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }
int64_t steps_of(int64_t k) { return (k + DEPTH - 1) / DEPTH; }

typedef float Line[BLOCK];
typedef Line Sums[2][GROUP];

// Where sums go: so many floats from line to line, and from block to block.
struct Place {
  float* first;
  int64_t line;
  int64_t block;
};

// GCC takes a function that only fetches for one without effect, and drops its calls unless they are inlined at once.
#define FETCHES __attribute__((always_inline))
// Weights that the next jobs multiply, in lines of 64 bytes. A core waits for few at once, and for fewer where the hardware prefetcher
// has seen enough of a page of 4 KiB to ask for the rest, for which that needs time: so parts are fetched in turn.
struct Ahead {
  const char* weight;
  int64_t part;   // bytes
  int64_t count;  // lines of all parts
  int64_t step;   // lines that are fetched in a step
  FETCHES void fetch(int64_t line) const {
    for (int64_t end = std::min(line + step, count); line < end; line++)
      __builtin_prefetch(weight + line % STREAMS * part + line / STREAMS * 64, 0, 2);
  }
};

// A group of rows times one block, or two adjacent ones.
struct Job {
  Place to;
  const char* x;
  const char* weight;
  int64_t x_stride;  // bytes
  int64_t block;     // bytes
  int64_t steps;
  int rows;
  int blocks;
  bool cold;  // no cache has the weights yet
  const Ahead& ahead;
  int64_t line;  // of these, the first that this job fetches

  FETCHES void fetch(int64_t step) const {
    if (cold) fetch_own(step);
    ahead.fetch(line + step * ahead.step);
  }

 private:
  // The weights of the step that comes AHEAD steps later, in these blocks or in the next.
  FETCHES void fetch_own(int64_t step) const {
    int64_t bytes = block / steps, there = step + AHEAD;
    const char* from = weight + there * bytes + (there < steps ? 0 : (blocks - 1) * block);
    for (int b = 0; b < blocks; b++, from += block)
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
  }
};

// Sums that are not results yet. A kernel may make results of some of their lines while it waits for weights.
struct Rest {
  const LinearArgs* a;
  void (*finish)(const LinearArgs&, const Sums&, int skip, void* out, int rows, int64_t block, int blocks);
  const Sums* sums;
  int skip;         // lines of sums
  char* out;        // the first line
  int64_t stride;   // bytes from line to line
  int rows;
  int64_t block;
  int blocks;

  void some(int lines) {
    if (lines > rows) lines = rows;
    if (lines == 0) return;
    finish(*a, *sums, skip, out, lines, block, blocks);
    skip += lines, out += lines * stride, rows -= lines;
  }
};

typedef void (*Kernel)(const Job&, Rest&);

// --- with vectors: sums in registers; a line of a block (16 outputs) is multiplied with 4 bytes of each row -------------

template <class D> struct Product {
  typedef typename D::type type;
  static constexpr int LINE = BLOCK * sizeof(type);  // bytes
  static constexpr int NEIGHBOURS = 1;               // in k, a line
  struct Weights { vf w[V]; };
  struct Factor { float x; };
  static Weights weights(const char* line) {
    Weights out;
    for (int v = 0; v < V; v++) out.w[v] = D::load(reinterpret_cast<const type*>(line) + v * W);
    return out;
  }
  static Factor factor(const char* x) {
    Factor out;
    memcpy(&out.x, x, 4);
    return out;
  }
  static vf add(vf sum, Factor factor, const Weights& weights, int v) { return sum + factor.x * weights.w[v]; }
};

template <> struct Product<Float<BF16>> {
  static constexpr int LINE = BLOCK * 4, NEIGHBOURS = 2;
#if defined(__AVX512BF16__)
  struct Weights { __m512bh w; };
  struct Factor { __m512bh x; };
  static Weights weights(const char* line) { return {(__m512bh)_mm512_loadu_si512(line)}; }
  static Factor factor(const char* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return {(__m512bh)_mm512_set1_epi32(pair)};
  }
  static vf add(vf sum, Factor factor, const Weights& weights, int) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, factor.x, weights.w);
  }
#else
  struct Weights { vf even[V], odd[V]; };
  struct Factor { vf even, odd; };
  static vf even(vi pairs) { return (vf)(pairs << 16); }
  static vf odd(vi pairs) { return (vf)(pairs & int32_t(0xffff0000)); }
  static Weights weights(const char* line) {
    Weights out;
    for (int v = 0; v < V; v++) {
      vi pairs = (vi)load(reinterpret_cast<const float*>(line) + v * W);
      out.even[v] = even(pairs);
      out.odd[v] = odd(pairs);
    }
    return out;
  }
  static Factor factor(const char* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return {even(vi{} + pair), odd(vi{} + pair)};
  }
  static vf add(vf sum, Factor factor, const Weights& weights, int v) {
    return sum + factor.even * weights.even[v] + factor.odd * weights.odd[v];
  }
#endif
};

// As the registers allow: there are 32, 16, or 16 of half a vector.
#if defined(__AVX512F__)
constexpr int ROWS = 12, AT_ONCE = 2;
#elif defined(__AVX2__)
constexpr int ROWS = 6, AT_ONCE = 1;
#else
constexpr int ROWS = 3, AT_ONCE = 1;
#endif

template <class P, int R, int B> void add_up(const Job& job, int block) {
  vf acc[R][B][V] = {};
  const char *x = job.x, *weight = job.weight + block * job.block;
  for (int64_t step = 0; step < job.steps; step++) {
    if (block == 0) job.fetch(step);
    for (int i = 0; i < DEPTH / P::NEIGHBOURS; i++, x += 4, weight += P::LINE) {
      typename P::Weights weights[B];
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) weights[b] = P::weights(weight + b * job.block);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        auto factor = P::factor(x + r * job.x_stride);
#pragma GCC unroll 4
        for (int j = 0; j < B * V; j++) acc[r][j / V][j % V] = P::add(acc[r][j / V][j % V], factor, weights[j / V], j % V);
      }
    }
  }
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(job.to.first + (block + b) * job.to.block + r * job.to.line + v * W, acc[r][b][v]);
}

template <class P, int R> void with_vectors(const Job& job, Rest&) {
  if (job.blocks == AT_ONCE) return add_up<P, R, AT_ONCE>(job, 0);
  for (int block = 0; block < job.blocks; block++) add_up<P, R, 1>(job, block);
}

template <class P, int R = ROWS> Kernel vectors_for(int rows) {
  if constexpr (R > 1)
    if (rows < R) return vectors_for<P, R - 1>(rows);
  return with_vectors<P, R>;
}

// --- with tiles: at most 2 x 16 rows times 2 blocks ---------------------------------------------------------------------

#if defined(__AMX_BF16__)

int tile_height(int rows) { return rows <= 16 ? rows : (rows + 1) / 2; }

// Tiles 0 to 3 are sums, 4 and 5 are of x, all as high as the group needs; 6 and 7 are weights.
// Where two tiles are higher than the group, some rows are in both.
template <bool TALL, bool WIDE> void with_tiles(const Job& job, Rest& rest) {
  int lines = (rest.rows + job.steps - 1) / job.steps;
  int second = job.rows - tile_height(job.rows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char *x = job.x, *weight = job.weight;
  for (int64_t step = 0; step < job.steps; step++, x += DEPTH * 2, weight += BLOCK * DEPTH * 2) {
    job.fetch(step);
    _tile_loadd(4, x, job.x_stride);
    _tile_loadd(6, weight, BLOCK * 4);
    _tile_dpbf16ps(0, 4, 6);
    if (WIDE) {
      _tile_loadd(7, weight + job.block, BLOCK * 4);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (TALL) {
      _tile_loadd(5, x + second * job.x_stride, job.x_stride);
      _tile_dpbf16ps(2, 5, 6);
      if (WIDE) _tile_dpbf16ps(3, 5, 7);
    }
    rest.some(lines);
  }
  float *top = job.to.first, *bottom = top + second * job.to.line;
  long line = job.to.line * sizeof(float);
  _tile_stored(0, top, line);
  if (WIDE) _tile_stored(1, top + job.to.block, line);
  if (TALL) _tile_stored(2, bottom, line);
  if (TALL && WIDE) _tile_stored(3, bottom + job.to.block, line);
}

void tiles(const Job& job, Rest& rest) {
  bool wide = job.blocks == 2;
  if (job.rows > 16) return wide ? with_tiles<true, true>(job, rest) : with_tiles<true, false>(job, rest);
  return wide ? with_tiles<false, true>(job, rest) : with_tiles<false, false>(job, rest);
}

#endif

// --- from sums to results -----------------------------------------------------------------------------------------------

// 1 + erf(x), within 2e-7. Abramowitz and Stegun 1964, 7.1.26, for erfc(|x|).
vf one_plus_erf(vf x) {
  vf size = max(x, -x), t = 1.0f / (1.0f + 0.3275911f * size);
  vf p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  vf rest = p * t * exp(-size * size);
  return x < 0 ? rest : 2.0f - rest;
}

inline vf logistic(vf x) { return 1.0f / (1.0f + exp(min(-x, splat(88.0f)))); }

// GELU: Hendrycks and Gimpel 2016, both forms; 1 + tanh(u) is 2 * logistic(2 u).
inline vf activate(vf x, int kind) {
  switch (kind) {
    case SILU: return x * logistic(x);
    case GELU: return 0.5f * x * one_plus_erf(x * 0.70710678f);
    case GELU_TANH: return x * logistic(1.59576912f * (x + 0.044715f * x * x * x));
    default: return x;
  }
}

// Lines of sums become the columns from `column` on of lines of `out`. `others` is the gated half's other one, or null.
template <class D>
void finish(const LinearArgs& a, const Line* sums, const Line* others, void* out, int rows, int64_t column) {
  int64_t width = a.gated ? a.n / 2 : a.n;
  int count = std::min<int64_t>(BLOCK, width - column);
  float bias[2][BLOCK] = {};
  if (a.bias) memcpy(bias[0], a.bias + column, count * sizeof(float));
  if (a.bias && others) memcpy(bias[1], a.bias + width + column, count * sizeof(float));
  auto* line = static_cast<typename D::type*>(out) + column;
  for (int r = 0; r < rows; r++, line += a.out_stride) {
    vf y[V];
    for (int v = 0; v < V; v++) {
      y[v] = activate(load(sums[r] + v * W) + load(bias[0] + v * W), a.activation);
      if (others) y[v] *= load(others[r] + v * W) + load(bias[1] + v * W);
      y[v] *= a.scale;
    }
    if (count == BLOCK) {
      for (int v = 0; v < V; v++) D::store(line + v * W, a.accumulate ? D::load(line + v * W) + y[v] : y[v]);
    } else {
      for (int i = 0; i < count; i++) line[i] = D::put((a.accumulate ? D::get(line[i]) : 0.0f) + y[i / W][i % W]);
    }
  }
}

// The lines of sums from `skip` on.
template <class D>
void finish_blocks(const LinearArgs& a, const Sums& sums, int skip, void* out, int rows, int64_t block, int blocks) {
  if (a.gated) return finish<D>(a, sums[0] + skip, sums[1] + skip, out, rows, block / 2 * BLOCK);
  for (int b = 0; b < blocks; b++) finish<D>(a, sums[b] + skip, nullptr, out, rows, (block + b) * BLOCK);
}

// --- which rows and blocks ----------------------------------------------------------------------------------------------

// The least height with which groups of at most `most` rows are as few as can be.
int even_height(int rows, int most) {
  int groups = (rows + most - 1) / most;
  return (rows + groups - 1) / groups;
}

// Every group is `height` rows high; the last may begin early, and what was computed before is not stored again.
void multiply(const LinearArgs& a, const char* x, char* out, int rows, Share share, Kernel kernel, int height) {
  int64_t x_line = int64_t(a.x_stride) * (a.weight_dtype == BF16 ? 2 : 4);
  int64_t out_line = int64_t(a.out_stride) * (a.out_dtype == F32 ? 4 : 2);
  int64_t steps = steps_of(a.k), block_bytes = steps * DEPTH * BLOCK * (a.weight_dtype == F32 ? 4 : 2);
  int64_t chunk = std::max<int64_t>(CACHED / x_line / height, 1) * height;
  auto finish = a.out_dtype == F32 ? finish_blocks<Float<F32>> : finish_blocks<Float<BF16>>;
  // Sums that are the results already go where these belong.
  bool ready = a.out_dtype == F32 && a.n % BLOCK == 0 && !a.bias && a.activation == NONE && a.scale == 1;
  ready = ready && !a.gated && !a.accumulate;
  Range mine = part(a.gated ? 2 * blocks_of(a.n / 2) : blocks_of(a.n), share, a.gated ? 2 : 1);
  Sums sums[2];  // of a job, and of the one before
  Rest rest = {};
  int now = 0;
  for (int64_t from = 0; from < rows; from += chunk) {
    int64_t end = std::min<int64_t>(from + chunk, rows), groups = (end - from + height - 1) / height;
    for (int64_t block = mine.begin; block < mine.end; block += 2) {
      auto* weight = static_cast<const char*>(a.weight) + block * block_bytes;
      int blocks = std::min<int64_t>(2, mine.end - block), left = std::min<int64_t>(2, mine.end - block - blocks);
      bool few = groups == 1 && height <= BLOCK;  // they take less time than the next weights
      int64_t lines = few ? 0 : left * block_bytes / 64, turns = groups * steps, line = 0;
      Ahead ahead = {weight + blocks * block_bytes, left * block_bytes / STREAMS, lines, (lines + turns - 1) / turns};
      for (int64_t row = from; row < end; row += height, now ^= 1, line += ahead.step * steps) {
        int64_t start = std::min<int64_t>(row, rows - height);
        int skip = row - start;
        Place to = {sums[now][0][0], BLOCK, GROUP * BLOCK};
        if (ready) to = {reinterpret_cast<float*>(out + start * out_line) + block * BLOCK, a.out_stride, BLOCK};
        bool cold = row == from && (few || block == mine.begin);
        kernel({to, x + start * x_line, weight, x_line, block_bytes, steps, height, blocks, cold, ahead, line}, rest);
        if (ready) continue;
        rest.some(rest.rows);
        rest = {&a, finish, &sums[now], skip, out + row * out_line, out_line, height - skip, block, blocks};
        if (height <= BLOCK) rest.some(rest.rows);  // memory is all that matters then
      }
    }
  }
  rest.some(rest.rows);
}

}  // namespace

void linear(const LinearArgs& a, const void* x, void* out, int rows, Share share) {
  if (rows == 0) return;
  auto* from = static_cast<const char*>(x);
  auto* to = static_cast<char*>(out);
#if defined(__AMX_BF16__)
  if (a.weight_dtype == BF16) {
    int height = even_height(rows, GROUP);
    configure_tiles(tile_height(height));
    multiply(a, from, to, rows, share, tiles, height);
    return _tile_release();
  }
#endif
  int height = even_height(rows, ROWS);
  with_dtype(a.weight_dtype, [&](auto d) {
    multiply(a, from, to, rows, share, vectors_for<Product<decltype(d)>>(height), height);
  });
}

// Block b of `weight` (n, k) goes to the place b * block_stride of `packed`.
void pack(const void* weight, void* packed, int n, int k, int dtype, int block_stride) {
  with_dtype(dtype, [&](auto d) {
    typedef typename decltype(d)::type type;
    constexpr int NEIGHBOURS = std::is_same_v<decltype(d), Float<BF16>> ? 2 : 1;
    int64_t padded = steps_of(k) * DEPTH;
    auto* lines = static_cast<const type*>(weight);
    for (int64_t block = 0; block < blocks_of(n); block++) {
      auto* to = static_cast<type*>(packed) + block * block_stride * BLOCK * padded;
      for (int64_t i = 0; i < padded; i += NEIGHBOURS)
        for (int64_t line = block * BLOCK; line < (block + 1) * BLOCK; line++)
          for (int64_t j = i; j < i + NEIGHBOURS; j++) *to++ = line < n && j < k ? lines[line * k + j] : type(0);
    }
  });
}

}  // namespace LEVEL
