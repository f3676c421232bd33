// What Python calls, by ctypes. Pointers to structs are those of `abi.py`.
#include "program.h"

#define ENTRY extern "C" __attribute__((visibility("default")))

ENTRY const char* tps_sources() { return SOURCES; }

// Sizes of the structs that cross, in the order of `abi.py`.
ENTRY void tps_sizes(int64_t* sizes) {
  const int64_t all[] = {sizeof(Step),       sizeof(EmbedArgs),     sizeof(NormArgs),   sizeof(LinearArgs), sizeof(TurnsArgs),
                         sizeof(RotaryArgs), sizeof(AttentionArgs), sizeof(ReduceArgs), sizeof(Group)};
  for (int64_t size : all) *sizes++ = size;
}

ENTRY const Kernels* tps_level(const char* name) { return level(name); }
ENTRY const char* tps_level_name(const Kernels* kernels) { return kernels->name; }

ENTRY void tps_pack(const Kernels* kernels, const void* weight, void* packed, int n, int k, int dtype, int block_stride) {
  kernels->pack(weight, packed, n, k, dtype, block_stride);
}

ENTRY Team* tps_team_new(int threads, const int32_t* cores) { return new Team(threads, cores); }
ENTRY void tps_team_delete(Team* team) { delete team; }

ENTRY Program* tps_program_new(const Kernels* kernels, Team* team, Group* group) { return new Program(*kernels, *team, group); }
ENTRY void tps_program_delete(Program* program) { delete program; }
ENTRY void tps_program_add(Program* program, int code, const void* args) { program->add(OpCode(code), args); }

// Seconds of each Part are added to `seconds`. False if some rank did not arrive in time.
ENTRY bool tps_program_run(Program* program, const Step* step, double* seconds) { return program->run(*step, seconds); }

ENTRY bool tps_gather(Group* group, const void* x, int64_t bytes, void* out) { return gather(*group, x, bytes, out); }
ENTRY bool tps_reduce(Group* group, float* x, int64_t count) { return reduce(*group, x, count); }
