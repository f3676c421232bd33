// Rotary position embedding, with the norm of queries and keys before it and the write into the pools behind it.
#include <cmath>

#include "kernels.h"
#include "moments.h"

namespace LEVEL {
namespace {

// What the norm makes of a head's values: (x - center) * scale * weight. Without one, `weight` is null.
struct Norm {
  const float* weight;
  float center;
  float scale;

  vf at(const float* x, int i) const { return weight ? (load(x + i) - center) * scale * load(weight + i) : load(x + i); }
  float one(const float* x, int i) const { return weight ? (x[i] - center) * scale * weight[i] : x[i]; }
};

Norm norm_of(const RotaryArgs& a, const float* x, int head) {
  if (a.norm_weight == nullptr) return {nullptr, 0, 1};
  float center = a.norm_kind == LAYER ? mean_of(x, a.head_dim) : 0.0f;
  float scale = 1.0f / std::sqrt(mean_square_of(x, a.head_dim, center) + a.eps);
  return {a.norm_weight + head * a.head_dim, center, scale};
}

// One head: dimension i and half + i are turned together (Su et al. 2021), those from 2 * half on are only normed.
template <class D>
void turn(const RotaryArgs& a, const float* x, Norm norm, const float* cos, const float* sin, typename D::type* out) {
  const float* above = x + a.half;
  Norm norm_above = {norm.weight ? norm.weight + a.half : nullptr, norm.center, norm.scale};
  int i = 0;
  for (; i + W <= a.half; i += W) {
    vf low = norm.at(x, i), high = norm_above.at(above, i), c = load(cos + i), s = load(sin + i);
    D::store(out + i, low * c - high * s);
    D::store(out + a.half + i, high * c + low * s);
  }
  for (; i < a.half; i++) {
    float low = norm.one(x, i), high = norm_above.one(above, i);
    out[i] = D::put(low * cos[i] - high * sin[i]);
    out[a.half + i] = D::put(high * cos[i] + low * sin[i]);
  }
  for (i = 2 * a.half; i < a.head_dim; i++) out[i] = D::put(norm.one(x, i));
}

template <class D> void copy(const float* x, typename D::type* out, int size) {
  int i = 0;
  for (; i + W <= size; i += W) D::store(out + i, load(x + i));
  for (; i < size; i++) out[i] = D::put(x[i]);
}

template <class Q, class D> void rotary_as(const RotaryArgs& a, const Step& step, Range tokens) {
  for (int64_t t = tokens.begin; t < tokens.end; t++) {
    const float* x = a.qkv + t * a.qkv_stride;
    const float *cos = a.cos + t * a.half, *sin = a.sin + t * a.half;
    auto* query = static_cast<typename Q::type*>(a.queries) + t * a.heads * a.head_dim;
    int64_t page = step.places[t] / a.page_size, within = step.places[t] % a.page_size, stride = int64_t(a.page_size) * a.head_dim;
    int64_t first = page * a.kv_heads * stride + within * a.head_dim;
    auto *key = static_cast<typename D::type*>(a.keys) + first, *value = static_cast<typename D::type*>(a.values) + first;
    int head = 0;
    for (; head < a.heads; head++, x += a.head_dim, query += a.head_dim) turn<Q>(a, x, norm_of(a, x, head), cos, sin, query);
    for (; head < a.heads + a.kv_heads; head++, x += a.head_dim, key += stride)
      turn<D>(a, x, norm_of(a, x, head), cos, sin, key);
    for (head = 0; head < a.kv_heads; head++, x += a.head_dim, value += stride) copy<D>(x, value, a.head_dim);
  }
}

}  // namespace

void turns(const TurnsArgs& a, const Step& step, Share share) {
  Range tokens = part(step.tokens, share);
  for (int64_t t = tokens.begin; t < tokens.end; t++)
    for (int i = 0; i < a.half; i++) {
      float angle = float(step.positions[t]) * a.frequencies[i];
      a.cos[t * a.half + i] = std::cos(angle) * a.scale;
      a.sin[t * a.half + i] = std::sin(angle) * a.scale;
    }
}

void rotary(const RotaryArgs& a, const Step& step, Share share) {
  with_dtype(a.query_dtype, [&](auto q) {
    with_dtype(a.kv_dtype, [&](auto d) { rotary_as<decltype(q), decltype(d)>(a, step, part(step.tokens, share)); });
  });
}

}  // namespace LEVEL
