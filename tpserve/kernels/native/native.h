// What the kernels are given. Plain C structs, mirrored field by field in `abi.py`, which compares their sizes.
//
// All kernels are compiled once for each level of the instruction set (`build.py`), into a namespace of its own; the
// best level that the machine has is chosen at run time (`cpu.cpp`). A kernel is called by every thread of the rank
// with its number, and does that thread's share; between kernels the threads meet at a barrier (`program.cpp`).
#pragma once

#include <cstddef>
#include <cstdint>

enum Dtype : int32_t { F32 = 0, BF16 = 1, F16 = 2 };
enum Activation : int32_t { NONE = 0, SILU = 1, GELU = 2, GELU_TANH = 3 };
enum NormKind : int32_t { RMS = 0, LAYER = 1 };

// The tokens of one step; those of a row are adjacent, rows in plan order. Arrays belong to the caller.
struct Step {
  const int64_t* ids;        // (tokens)
  const int64_t* positions;  // (tokens)
  const int64_t* places;     // (tokens) where keys and values go: page * page_size + offset
  const int64_t* first;      // (rows) the row's first token
  const int64_t* starts;     // (rows) that token's position
  const int64_t* counts;     // (rows) tokens
  const int64_t* slots;      // (rows) the row's line in `tables`
  const int64_t* tables;     // (slots, table_stride) pages in order
  int64_t table_stride;
  int32_t tokens;
  int32_t rows;
};

// One thread's part of the work.
struct Share {
  int32_t thread;
  int32_t threads;
};

// x (tokens, hidden) float32 = table[id] * scale.
struct EmbedArgs {
  const void* table;  // (vocabulary, hidden)
  float* x;
  float scale;
  int32_t hidden;
  int32_t x_stride;
  int32_t table_dtype;
};

// Lines of x, float32, normed into `out`. Zhang and Sennrich 2019 (RMS), Ba et al. 2016 (LAYER).
struct NormArgs {
  const float* x;
  void* out;
  const float* weight;
  const float* bias;  // or null
  float eps;
  int32_t kind;
  int32_t size;
  int32_t x_stride;
  int32_t out_stride;
  int32_t out_dtype;
};

// out = x times weight, plus bias. `weight` is packed as `linear.cpp` says. x is in the compute dtype (BF16 for BF16 weights,
// else F32), and its lines are zero from k to the next multiple of 32. `out` has n columns; n / 2 if gated: then the
// weight's blocks are alternately of the gate and of the other half, and out = activation(gate) * other.
struct LinearArgs {
  const void* x;
  void* out;
  const void* weight;
  const float* bias;  // (n), a gated one's gate half first; or null
  float scale;        // of the whole result, 1 if none
  int32_t n;
  int32_t k;
  int32_t x_stride;    // elements, a multiple of 32
  int32_t out_stride;  // elements
  int32_t weight_dtype;
  int32_t out_dtype;
  int32_t activation;  // of the result, or of the gate
  int32_t gated;
  int32_t accumulate;  // add to out, which is F32
};

// cos and sin (tokens, half), float32, of position * frequency, times scale.
struct TurnsArgs {
  const float* frequencies;  // (half)
  float* cos;
  float* sin;
  float scale;
  int32_t half;
};

// From the fused product (tokens, heads + 2 * kv_heads, head_dim), float32: queries and keys are normed (if weights are given) and
// rotated (halves of the first 2 * half dimensions are paired); queries go to `queries`, keys and values into the pools.
struct RotaryArgs {
  const float* qkv;
  const float* cos;
  const float* sin;
  const float* norm_weight;  // (heads + kv_heads, head_dim), or null
  void* queries;             // (tokens, heads, head_dim) in the compute dtype
  void* keys;                // (pages, kv_heads, page_size, head_dim)
  void* values;
  float eps;
  int32_t norm_kind;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t half;
  int32_t page_size;
  int32_t qkv_stride;
  int32_t query_dtype;
  int32_t kv_dtype;
};

// Softmax attention of each row's tokens over the row's pages, up to the token itself (Vaswani et al. 2017).
struct AttentionArgs {
  const void* queries;  // (tokens, heads, head_dim) in the compute dtype
  const void* keys;     // (pages, kv_heads, page_size, head_dim)
  const void* values;
  void* out;  // (tokens, out_stride) in the compute dtype
  float scale;
  float softcap;   // scores become softcap * tanh(score / softcap); 0 is off
  int32_t window;  // tokens that a query sees, its own included; 0 is off
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t page_size;
  int32_t out_stride;
  int32_t query_dtype;
  int32_t kv_dtype;
};

// The kernels of one level. Those with `rows` work on so many lines from the pointers on, which stand in for those in the arguments.
struct Kernels {
  const char* name;
  void (*embed)(const EmbedArgs&, const Step&, Share);
  void (*norm)(const NormArgs&, const float* x, void* out, int rows, Share);
  // x += the sum of `ranks` lines of `size`, `stride` apart, plus bias (or null), normed by `out_norm` (or null: as it is).
  void (*add)(float* x, int size, const float* parts, int64_t stride, int ranks, const float* bias, const NormArgs* out_norm);
  void (*linear)(const LinearArgs&, const void* x, void* out, int rows, Share);
  void (*pack)(const void* weight, void* packed, int n, int k, int dtype, int block_stride);
  void (*turns)(const TurnsArgs&, const Step&, Share);
  void (*rotary)(const RotaryArgs&, const Step&, Share);
  void (*attention)(const AttentionArgs&, const Step&, Share);
  const struct SamplingKernels* sampling;  // sampling.h
};

const Kernels* level(const char* name);  // null if this build or this machine has no such level; the best for null

// This thread's part of `count` things, cut at multiples of `unit`.
struct Range {
  int64_t begin;
  int64_t end;
};

inline Range part(int64_t count, Share share, int64_t unit = 1) {
  int64_t units = (count + unit - 1) / unit;
  int64_t begin = units * share.thread / share.threads * unit;
  int64_t end = units * (share.thread + 1) / share.threads * unit;
  return {begin, end < count ? end : count};
}
