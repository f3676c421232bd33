// What is done to a rank's slice of the logits. `worker/passes.py` says what each pass is; here is how it is given its rows.
#pragma once

#include <cstdint>

// Rows of a matrix of logits, float32: those at `index`, int64 (count).
struct LogitRows {
  float* logits;
  const int64_t* index;
  int64_t stride;
  int32_t columns;
  int32_t count;
};

// How rows are drawn from: arrays of (count). Nothing below `least` is.
struct DrawArgs {
  const float* tops;
  const float* temperatures;
  const float* least;
  const uint64_t* keys;
  const int64_t* positions;
  int64_t first_block;
};

// What is weighed: logits from `least` on, and from `above` on, which is not less. Arrays of (count).
struct MassArgs {
  const float* tops;
  const float* temperatures;
  const float* least;
  const float* above;
};

// What has occurred in the rows, one after the other: `sizes` of each. The rest is (count).
struct PastArgs {
  const int32_t* columns;
  const int32_t* counts;
  const int64_t* sizes;
  const float* repetition;
  const float* presence;
  const float* frequency;
};

constexpr int MOST_TOP = 1024;  // of the greatest logits that are looked for at once

struct SamplingKernels {
  void (*greatest)(const LogitRows&, float* values, int64_t* columns);
  // `values` and `columns` hold each row's greatest, and get what is drawn.
  void (*draw)(const LogitRows&, const DrawArgs&, float* values, int64_t* columns);
  void (*mass)(const LogitRows&, const MassArgs&, int64_t* wholes, int64_t* parts);
  void (*count)(const LogitRows&, const float* least, int64_t* counts);
  void (*top)(const LogitRows&, int width, float* values, int32_t* columns);  // width <= MOST_TOP
  void (*log_sum_exp)(const LogitRows&, float* sums);
  void (*mask)(const LogitRows&, const uint32_t* words, int64_t words_stride);
  void (*penalize)(const LogitRows&, const PastArgs&);
};
