// The sampler's passes, as Python calls them (`worker/native_passes.py`).
#include "native.h"
#include "sampling.h"

#define ENTRY extern "C" __attribute__((visibility("default")))

ENTRY void tps_sampling_greatest(const Kernels* k, const LogitRows* rows, float* values, int64_t* columns) {
  k->sampling->greatest(*rows, values, columns);
}

ENTRY void tps_sampling_draw(const Kernels* k, const LogitRows* rows, const DrawArgs* args, float* values, int64_t* columns) {
  k->sampling->draw(*rows, *args, values, columns);
}

ENTRY void tps_sampling_mass(const Kernels* k, const LogitRows* rows, const MassArgs* args, int64_t* wholes, int64_t* parts) {
  k->sampling->mass(*rows, *args, wholes, parts);
}

ENTRY void tps_sampling_count(const Kernels* k, const LogitRows* rows, const float* least, int64_t* counts) {
  k->sampling->count(*rows, least, counts);
}

ENTRY void tps_sampling_top(const Kernels* k, const LogitRows* rows, int width, float* values, int32_t* columns) {
  k->sampling->top(*rows, width, values, columns);
}

ENTRY void tps_sampling_log_sum_exp(const Kernels* k, const LogitRows* rows, float* sums) {
  k->sampling->log_sum_exp(*rows, sums);
}

ENTRY void tps_sampling_mask(const Kernels* k, const LogitRows* rows, const uint32_t* words, int64_t words_stride) {
  k->sampling->mask(*rows, words, words_stride);
}

ENTRY void tps_sampling_penalize(const Kernels* k, const LogitRows* rows, const PastArgs* past) {
  k->sampling->penalize(*rows, *past);
}
