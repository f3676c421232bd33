#include "collective.h"

#include <cstring>

#include "wait.h"

namespace {

uint64_t* flag(const Group& g, int rank) { return reinterpret_cast<uint64_t*>(g.flags + rank * g.flag_stride); }

uint8_t* slot_of(const Group& g, uint64_t sequence, int rank) {
  return g.slots + ((sequence & 1) * g.size + rank) * g.capacity;
}

bool exchange(Group& g, const void* x, int64_t bytes) {
  memcpy(next_slot(g), x, bytes);
  arrive(g);
  return all_arrived(g);
}

}  // namespace

uint8_t* next_slot(const Group& g) { return slot_of(g, g.sequence + 1, g.rank); }

const uint8_t* slots(const Group& g) { return slot_of(g, g.sequence, 0); }

void arrive(Group& g) {
  g.sequence++;
  __atomic_store_n(flag(g, g.rank), g.sequence, __ATOMIC_RELEASE);
}

bool all_arrived(const Group& g) {
  for (int rank = 0; rank < g.size; rank++) {
    uint64_t* reached = flag(g, rank);
    if (!wait_until([&] { return __atomic_load_n(reached, __ATOMIC_ACQUIRE) >= g.sequence; }, g.limit_ns)) return false;
  }
  return true;
}

bool gather(Group& g, const void* x, int64_t bytes, void* out) {
  auto* from = static_cast<const uint8_t*>(x);
  auto* to = static_cast<uint8_t*>(out);
  for (int64_t at = 0; at < bytes || at == 0; at += g.capacity) {
    int64_t size = bytes - at < g.capacity ? bytes - at : g.capacity;
    if (!exchange(g, from + at, size)) return false;
    for (int rank = 0; rank < g.size; rank++) memcpy(to + rank * bytes + at, slots(g) + rank * g.capacity, size);
  }
  return true;
}

bool reduce(Group& g, float* x, int64_t count) {
  int64_t most = g.capacity / int64_t(sizeof(float));
  for (int64_t at = 0; at < count || at == 0; at += most) {
    int64_t size = count - at < most ? count - at : most;
    if (!exchange(g, x + at, size * sizeof(float))) return false;
    memcpy(x + at, slots(g), size * sizeof(float));
    for (int rank = 1; rank < g.size; rank++) {
      auto* other = reinterpret_cast<const float*>(slots(g) + rank * g.capacity);
      for (int64_t i = 0; i < size; i++) x[at + i] += other[i];
    }
  }
  return true;
}
