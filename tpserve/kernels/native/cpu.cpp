// Which level of the instruction set this machine has.
#include <cstring>
#include <sys/syscall.h>
#include <unistd.h>

#include "native.h"

#define DECLARE(level) namespace level { extern const Kernels kernels; }
DECLARE(plain)
#ifdef HAS_AVX2
DECLARE(avx2)
DECLARE(avx512)
DECLARE(amx)
#endif

namespace {

#ifdef HAS_AVX2
// Linux keeps the tiles' state only for processes that asked for it.
bool has_amx() {
  constexpr int request_permission = 0x1023, tile_data = 18;
  unsigned eax = 7, ebx, ecx = 0, edx;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  if ((edx & amx_bf16) == 0 || (edx & amx_tile) == 0) return false;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}
#endif

}  // namespace

const Kernels* level(const char* name) {
#ifdef HAS_AVX2
  struct { const Kernels& kernels; bool (*has)(); } const levels[] = {
      {amx::kernels, [] { return has_avx512() && has_amx(); }}, {avx512::kernels, has_avx512}, {avx2::kernels, has_avx2}};
  for (auto& each : levels)
    if ((name == nullptr || strcmp(name, each.kernels.name) == 0) && each.has()) return &each.kernels;
#endif
  return name == nullptr || strcmp(name, plain::kernels.name) == 0 ? &plain::kernels : nullptr;
}
