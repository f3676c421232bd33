// The kernels of the level that is being compiled (-DLEVEL).
#pragma once

#include "native.h"

namespace LEVEL {

void embed(const EmbedArgs&, const Step&, Share);
void norm(const NormArgs&, const float* x, void* out, int rows, Share);
void add(float* x, int size, const float* parts, int64_t stride, int ranks, const float* bias, const NormArgs* out_norm);
void linear(const LinearArgs&, const void* x, void* out, int rows, Share);
void pack(const void* weight, void* packed, int n, int k, int dtype, int block_stride);
void turns(const TurnsArgs&, const Step&, Share);
void rotary(const RotaryArgs&, const Step&, Share);
void attention(const AttentionArgs&, const Step&, Share);

}  // namespace LEVEL
