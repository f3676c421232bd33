// The passes of the sampler over rows of logits. All but the rare work is on vectors; columns are read in order.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "vec.h"

namespace LEVEL {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float UNIT = 1 << 29;      // mass of the likeliest id: 32 bits hold four of them
constexpr float NO_MASS = -20.8f;    // exp of this rounds to no mass
constexpr float LN2 = 0.693147181f;
constexpr double HIGHEST = 16.64;    // no noise is above this
constexpr double ROUNDING = 0x1p-20; // relative; several times what a sum loses in float32
constexpr int CHUNK = 4 * W;         // columns

typedef uint64_t vl __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));

inline bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  uint64_t bits = 0;
  for (int i = 0; i < W / 2; i++) bits |= ((vl)mask)[i];
  return bits != 0;
#endif
}

// The lanes of four masks as bits.
inline uint64_t bits_of(const vi masks[4]) {
  uint64_t bits = 0;
  for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
    bits |= uint64_t(_mm512_movepi32_mask((__m512i)masks[i])) << i * W;
#elif defined(__AVX2__)
    bits |= uint64_t(uint32_t(_mm256_movemask_ps((__m256)masks[i]))) << i * W;
#else
    for (int lane = 0; lane < W; lane++) bits |= uint64_t(masks[i][lane] & 1) << (i * W + lane);
#endif
  }
  return bits;
}

// Four vectors of a row.
struct Chunk {
  vf x[4];

  vf greatest() const { return max(max(x[0], x[1]), max(x[2], x[3])); }
  bool reaches(float least) const {
    return any((x[0] >= least) | (x[1] >= least) | (x[2] >= least) | (x[3] >= least));
  }
};

// Calls f(chunk, its first column) for all of a row; beyond its end there is minus infinity.
template <class F> inline void for_chunks(const float* row, int columns, F f) {
  int at = 0;
  for (; at + CHUNK <= columns; at += CHUNK) f(Chunk{{load(row + at), load(row + at + W), load(row + at + 2 * W), load(row + at + 3 * W)}}, at);
  if (at == columns) return;
  float rest[CHUNK];
  std::fill_n(std::copy(row + at, row + columns, rest), CHUNK - (columns - at), -INF);
  f(Chunk{{load(rest), load(rest + W), load(rest + 2 * W), load(rest + 3 * W)}}, at);
}

inline const float* row_of(const LogitRows& rows, int r) { return rows.logits + rows.index[r] * rows.stride; }

// ---- The greatest of a row

constexpr int SPAN = 16 * CHUNK;  // columns, of which the greatest is found before it is asked where it is

void greatest_of(const float* row, int columns, float& value, int64_t& column) {
  value = -INF, column = 0;
  for (int at = 0; at < columns; at += SPAN) {
    vf best = splat(-INF);
    vi nan = {};
    for_chunks(row + at, std::min(SPAN, columns - at), [&](const Chunk& chunk, int) {
      for (vf x : chunk.x) nan |= x != x;
      best = max(best, chunk.greatest());
    });
    float most = -INF;
    for (int i = 0; i < W; i++) most = std::max(most, best[i]);
    if (any(nan)) most = NAN;
    if (!(most <= value)) value = most, column = at;
    if (most != most) return;
  }
  if (columns) column = std::find(row + column, row + columns, value) - row;
}

// ---- Noise: `worker/noise.py`

// Products of the low 32 bits; two vectors' even lanes in turn; their odd lanes.
#if defined(__AVX512F__)
inline vl times(vl a, uint32_t m) { return (vl)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m)); }
inline vu evens(vl a, vl b) { return (vu)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
inline vu odds(vl a, vl b) { return (vu)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
inline vl times(vl a, uint32_t m) { return (vl)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m)); }
inline vu evens(vl a, vl b) { return (vu)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
inline vu odds(vl a, vl b) { return (vu)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
#else
inline vl times(vl a, uint32_t m) { return (a & 0xffffffff) * uint64_t(m); }
inline vu evens(vl a, vl b) {
  for (int i = 1; i < W / 2; i += 2) a[i] = b[i - 1];
  return (vu)a;
}
inline vu odds(vl a, vl b) {
  for (int i = 1; i < W / 2; i += 2) b[i - 1] = a[i];
  return (vu)b;
}
#endif

// The words of CHUNK ids from `block` on, in order. A lane of 64 bits works on a block, and may have anything above 32 bits.
inline void philox(uint32_t block, uint32_t position, uint64_t key, vu words[4]) {
  // Blocks are dealt to lanes such that pairing the words of even lanes, and of odd ones, puts them in order.
  vl c0[2], c1[2], c2[2] = {}, c3[2] = {};
  for (int half = 0; half < 2; half++) {
    for (int i = 0; i < W / 2; i++) c0[half][i] = block + half * (W / 2) + i / 2 + i % 2 * (W / 4);
    c1[half] = vl{} + position;
  }
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85)
    for (int half = 0; half < 2; half++) {
      vl p0 = times(c0[half], 0xD2511F53), p1 = times(c2[half], 0xCD9E8D57);
      c0[half] = (p1 >> 32) ^ c1[half] ^ uint64_t(k0);
      c2[half] = (p0 >> 32) ^ c3[half] ^ uint64_t(k1);
      c1[half] = p1, c3[half] = p0;
    }
  for (int half = 0; half < 2; half++) {
    vl low = (c0[half] & 0xffffffff) | (c1[half] << 32), high = (c2[half] & 0xffffffff) | (c3[half] << 32);
    words[2 * half] = evens(low, high), words[2 * half + 1] = odds(low, high);
  }
}

float noise(uint32_t word) {
  double u = std::min((word + 0.5) * 0x1p-32, 1 - 0x1p-24);
  return float(-std::log(-std::log(u)));
}

// ---- A draw: the arg max of (logit - top) / temperature + noise
//
// An id with x = (logit - reference) / temperature, where `reference` is the row's greatest logit, beats a sum s only if its
// noise n is above d - x, d being what s is above the reference's own part. With n = -log(-log u) that takes
// 1 - u < -log u < exp(x - d), or log(1 - u) < x - d; and of a logarithm, exponent and fraction of the number itself are a lower
// bound. So no function is needed to see that most ids cannot win; and where x - d is below the logarithm of 2**-24, the least
// 1 - u that there is, not even their words are.

class Draw {
 public:
  Draw(const float* row, int columns, const DrawArgs& a, int r)
      : row_(row), columns_(columns), top_(a.tops[r]), temperature_(a.temperatures[r]), scale_(1 / temperature_), least_(a.least[r]), key_(a.keys[r]),
        position_(uint32_t(a.positions[r])), first_block_(uint32_t(a.first_block)) {}

  // Given the row's greatest logit and its column, replaces them by what is drawn.
  void operator()(float& value, int64_t& column) {
    if (!(value < INF)) return;  // nor is NaN drawn from
    if (!(value >= least_) || value == -INF) {
      value = -INF, column = 0;
      return;
    }
    reference_ = value;
    best_ = -INF, at_ = 0;
    vu words[4];
    int first = int(column) / CHUNK * CHUNK;
    philox(first_block_ + first / 4, position_, key_, words);
    uint32_t word;
    memcpy(&word, reinterpret_cast<const char*>(words) + 4 * (column - first), 4);
    consider(value, word, int(column));
    for_chunks(row_, columns_, [this](const Chunk& chunk, int at) { look(chunk, at); });
    value = best_, column = at_;
  }

 private:
  void look(const Chunk& chunk, int at) {
    if (!chunk.reaches(lowest_)) return;
    vu words[4];
    philox(first_block_ + at / 4, position_, key_, words);
    vi hopeful[4];
    for (int i = 0; i < 4; i++) {
      vf rest = __builtin_convertvector((vi)(~words[i] >> 1), vf) * 0x1p-31f;  // 1 - u
      vf log = __builtin_convertvector((vi)max(rest, splat(0x1p-24f)), vf) * (LN2 / (1 << 23)) - 127 * LN2;
      hopeful[i] = (log <= (chunk.x[i] - reference_) * scale_ + ahead_) & (chunk.x[i] >= lowest_);
    }
    if (!any(hopeful[0] | hopeful[1] | hopeful[2] | hopeful[3])) return;
    for (uint64_t bits = bits_of(hopeful); bits; bits &= bits - 1) {
      int i = __builtin_ctzll(bits);
      consider(chunk.x[i / W][i % W], words[i / W][i % W], at + i);
    }
  }

  void consider(float logit, uint32_t word, int column) {
    float sum = (logit - top_) / temperature_ + noise(word);
    if (!(sum > best_ || (sum == best_ && column < at_))) return;
    best_ = sum, at_ = column;
    double slack = ROUNDING * (HIGHEST + std::fabs(double(best_)));
    double ahead = (double(reference_) - top_) / temperature_ - best_ + slack;
    ahead_ = float(ahead + 1e-4);  // more than what is lost in float32
    double bound = reference_ - temperature_ * (ahead + HIGHEST);
    lowest_ = std::max(least_, float(bound));
  }

  const float* row_;
  int columns_;
  float top_, temperature_, scale_, least_;
  uint64_t key_;
  uint32_t position_, first_block_;
  float reference_ = 0, best_ = 0, ahead_ = 0, lowest_ = 0;
  int at_ = 0;
};

// ---- Sums over a row

// Of exp((logit - top) / temperature) in units of 1 / UNIT, each rounded: of logits from `least` on, and of those from `above` on.
void masses_of(const float* row, int columns, float top, float temperature, float least, float above, int64_t& whole, int64_t& part) {
  float lowest = std::max(least, top + temperature * (NO_MASS - 0.5f));
  vf scale = splat(1 / temperature);
  vl wholes = {}, parts = {};
  auto widened = [](vu x) { return ((vl)x & 0xffffffff) + ((vl)x >> 32); };
  for_chunks(row, columns, [&](const Chunk& chunk, int) {
    if (!chunk.reaches(lowest)) return;
    vu all = {}, some = {};
    for (vf x : chunk.x) {
      vf mass = exp((x - top) * scale) * UNIT + 0.5f;
      vu rounded = (vu)(__builtin_convertvector(mass, vi) & (x >= lowest));
      all += rounded;
      some += rounded & (vu)(x >= above);
    }
    wholes += widened(all), parts += widened(some);
  });
  whole = part = 0;
  for (int i = 0; i < W / 2; i++) whole += int64_t(wholes[i]), part += int64_t(parts[i]);
}

int64_t count_of(const float* row, int columns, float least) {
  vi counts = {};
  int beyond = -columns & (CHUNK - 1);  // minus infinity there is counted if `least` is that
  for_chunks(row, columns, [&](const Chunk& chunk, int) {
    for (vf x : chunk.x) counts -= x >= least;
  });
  int64_t total = least == -INF ? -beyond : 0;
  for (int i = 0; i < W; i++) total += counts[i];
  return total;
}

float log_sum_exp_of(const float* row, int columns) {
  float most;
  int64_t column;
  greatest_of(row, columns, most, column);
  if (!(most > -INF && most < INF)) return most;
  double total = 0;
  for (int at = 0; at < columns; at += SPAN) {  // a few are summed in float32, which loses little
    vf sums = {};
    for_chunks(row + at, std::min(SPAN, columns - at), [&](const Chunk& chunk, int) {
      for (vf x : chunk.x) sums += exp(x - most);
    });
    total += sum(sums);
  }
  return float(most + std::log(total));
}

// ---- The greatest few of a row

// Value and column as one integer, that is less where the value is greater or, of equals, the column is less.
inline uint64_t entry(float value, int column) {
  value += 0.0f;  // minus zero becomes zero, which it equals
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits ^= ~uint32_t(int32_t(bits) >> 31) & 0x7fffffff;
  return uint64_t(bits) << 32 | uint32_t(column);
}

void top_of(const float* row, int columns, int width, float* values, int32_t* out) {
  uint64_t entries[2 * MOST_TOP + CHUNK];
  int held = 0, wanted = std::min(width, columns);
  float passed = -INF;  // what is not above this is not among the greatest
  auto cut = [&] {
    std::nth_element(entries, entries + wanted - 1, entries + held);
    held = wanted;
    passed = row[uint32_t(entries[wanted - 1])];
  };
  std::fill_n(values, width, -INF), std::fill_n(out, width, 0);
  if (!wanted) return;
  for (; held < wanted; held++) entries[held] = entry(row[held], held);
  cut();
  for_chunks(row + wanted, columns - wanted, [&](const Chunk& chunk, int at) {
    vi above[4];
    for (int i = 0; i < 4; i++) above[i] = chunk.x[i] > passed;
    if (!any(above[0] | above[1] | above[2] | above[3])) return;
    for (uint64_t bits = bits_of(above); bits; bits &= bits - 1) {
      int i = wanted + at + __builtin_ctzll(bits);
      entries[held++] = entry(row[i], i);
    }
    if (held > 2 * wanted) cut();
  });
  if (held > wanted) cut();
  std::sort(entries, entries + held);
  for (int i = 0; i < held; i++) out[i] = int32_t(entries[i]), values[i] = row[out[i]];
}

// ---- The table's functions: each row by itself

void greatest(const LogitRows& rows, float* values, int64_t* columns) {
  for (int r = 0; r < rows.count; r++) greatest_of(row_of(rows, r), rows.columns, values[r], columns[r]);
}

void draw(const LogitRows& rows, const DrawArgs& args, float* values, int64_t* columns) {
  for (int r = 0; r < rows.count; r++) Draw(row_of(rows, r), rows.columns, args, r)(values[r], columns[r]);
}

void mass(const LogitRows& rows, const MassArgs& a, int64_t* wholes, int64_t* parts) {
  for (int r = 0; r < rows.count; r++)
    masses_of(row_of(rows, r), rows.columns, a.tops[r], a.temperatures[r], a.least[r], a.above[r], wholes[r], parts[r]);
}

void count(const LogitRows& rows, const float* least, int64_t* counts) {
  for (int r = 0; r < rows.count; r++) counts[r] = count_of(row_of(rows, r), rows.columns, least[r]);
}

void top(const LogitRows& rows, int width, float* values, int32_t* columns) {
  for (int r = 0; r < rows.count; r++)
    top_of(row_of(rows, r), rows.columns, width, values + int64_t(r) * width, columns + int64_t(r) * width);
}

void log_sum_exp(const LogitRows& rows, float* sums) {
  for (int r = 0; r < rows.count; r++) sums[r] = log_sum_exp_of(row_of(rows, r), rows.columns);
}

void mask(const LogitRows& rows, const uint32_t* words, int64_t words_stride) {
  for (int r = 0; r < rows.count; r++) {
    float* row = rows.logits + rows.index[r] * rows.stride;
    const uint32_t* allowed = words + r * words_stride;
    for (int at = 0; at < rows.columns; at += 32) {
      uint32_t word = allowed[at / 32];
      int count = std::min(32, rows.columns - at);
      for (int i = 0; i < count; i++) row[at + i] = word >> i & 1 ? row[at + i] : -INF;
    }
  }
}

void penalize(const LogitRows& rows, const PastArgs& past) {
  const int32_t* columns = past.columns;
  const int32_t* counts = past.counts;
  for (int r = 0; r < rows.count; r++) {
    float* row = rows.logits + rows.index[r] * rows.stride;
    float repetition = past.repetition[r], presence = past.presence[r], frequency = past.frequency[r];
    for (int64_t i = 0; i < past.sizes[r]; i++, columns++, counts++) {
      float& x = row[*columns];
      x = (x > 0 ? x / repetition : x * repetition) - frequency * *counts;
      if (*counts) x -= presence;
    }
  }
}

}  // namespace

extern const SamplingKernels sampling;
const SamplingKernels sampling = {greatest, draw, mass, count, top, log_sum_exp, mask, penalize};

}  // namespace LEVEL
