// What is done to whole lines of hidden states: embedding and norms.
#include <cmath>
#include <vector>

#include "kernels.h"
#include "moments.h"
#include "vec.h"

namespace LEVEL {
namespace {

// The table may lie on small pages of a file, where each line would be waited for: some are fetched ahead.
template <class D> void embed_as(const EmbedArgs& a, const Step& step, Range tokens) {
  constexpr int AHEAD = 2;
  auto* table = static_cast<const typename D::type*>(a.table);
  for (int64_t t = tokens.begin; t < tokens.end; t++) {
    auto* line = table + step.ids[t] * a.hidden;
    if (t + AHEAD < tokens.end) {
      auto* next = table + step.ids[t + AHEAD] * a.hidden;
      for (int i = 0; i < a.hidden; i += 64 / int(sizeof(*next))) __builtin_prefetch(next + i);
    }
    float* x = a.x + t * a.x_stride;
    int i = 0;
    for (; i + W <= a.hidden; i += W) store(x + i, D::load(line + i) * a.scale);
    for (; i < a.hidden; i++) x[i] = D::get(line[i]) * a.scale;
  }
}

template <class D> void norm_line(const NormArgs& a, const float* x, typename D::type* out) {
  float center = a.kind == LAYER ? mean_of(x, a.size) : 0.0f;
  float scale = 1.0f / std::sqrt(mean_square_of(x, a.size, center) + a.eps);
  int i = 0;
  for (; i + W <= a.size; i += W) {
    vf y = (load(x + i) - center) * scale * load(a.weight + i);
    D::store(out + i, a.bias ? y + load(a.bias + i) : y);
  }
  for (; i < a.size; i++) {
    float y = (x[i] - center) * scale * a.weight[i];
    out[i] = D::put(a.bias ? y + a.bias[i] : y);
  }
}

// Summed in rank order, so that a result does not depend on who came first.
void add_parts(float* out, const float* x, int size, const float* parts, int64_t stride, int ranks, const float* bias) {
  int i = 0;
  for (; i + W <= size; i += W) {
    vf total = load(parts + i);
    for (int rank = 1; rank < ranks; rank++) total += load(parts + rank * stride + i);
    if (bias) total += load(bias + i);
    store(out + i, x ? load(x + i) + total : total);
  }
  for (; i < size; i++) {
    float total = parts[i];
    for (int rank = 1; rank < ranks; rank++) total += parts[rank * stride + i];
    if (bias) total += bias[i];
    out[i] = x ? x[i] + total : total;
  }
}

}  // namespace

void embed(const EmbedArgs& a, const Step& step, Share share) {
  with_dtype(a.table_dtype, [&](auto d) { embed_as<decltype(d)>(a, step, part(step.tokens, share)); });
}

void norm(const NormArgs& a, const float* x, void* out, int rows, Share share) {
  with_dtype(a.out_dtype, [&](auto d) {
    typedef decltype(d) D;
    Range lines = part(rows, share);
    for (int64_t t = lines.begin; t < lines.end; t++)
      norm_line<D>(a, x + t * a.x_stride, static_cast<typename D::type*>(out) + t * a.out_stride);
  });
}

void add(float* x, int size, const float* parts, int64_t stride, int ranks, const float* bias, const NormArgs* out_norm) {
  if (!out_norm) return add_parts(x, x, size, parts, stride, ranks, bias);
  static thread_local std::vector<float> line;
  if (int(line.size()) < size) line.resize(size);
  add_parts(line.data(), nullptr, size, parts, stride, ranks, bias);
  norm_line<Float<F32>>(*out_norm, line.data(), line.data());
  add_parts(x, x, size, line.data(), 0, 1, nullptr);
}

}  // namespace LEVEL
