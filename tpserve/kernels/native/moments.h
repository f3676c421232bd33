// Means over a line, as norms need them.
#pragma once

#include "vec.h"

namespace LEVEL {

inline float mean_of(const float* x, int size) {
  vf sums[4] = {};
  int i = 0;
  for (; i + 4 * W <= size; i += 4 * W)
    for (int j = 0; j < 4; j++) sums[j] += load(x + i + j * W);
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < size; i++) total += x[i];
  return total / size;
}

inline float mean_square_of(const float* x, int size, float center) {
  vf sums[4] = {};
  int i = 0;
  for (; i + 4 * W <= size; i += 4 * W)
    for (int j = 0; j < 4; j++) {
      vf d = load(x + i + j * W) - center;
      sums[j] += d * d;
    }
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < size; i++) total += (x[i] - center) * (x[i] - center);
  return total / size;
}

}  // namespace LEVEL
