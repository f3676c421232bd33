// The table of one level's kernels.
#include "kernels.h"

#define NAME_OF(level) #level
#define NAME(level) NAME_OF(level)

namespace LEVEL {

extern const SamplingKernels sampling;
extern const Kernels kernels;
const Kernels kernels = {NAME(LEVEL), embed, norm, add, linear, pack, turns, rotary, attention, &sampling};

}  // namespace LEVEL
