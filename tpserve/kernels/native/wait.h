// How one waits here for another processor: look often at first, then give way. What is waited for is mostly late by less
// than a time slice; but if the other has no core to run on, looking would keep this one from it.
#pragma once

#include <ctime>
#include <sched.h>

#if defined(__x86_64__)
inline void relax() { __builtin_ia32_pause(); }
#else
inline void relax() {}
#endif

inline long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

// Waits until `done()`; false if that takes longer than `limit_ns`.
template <class Done> bool wait_until(Done done, long limit_ns) {
  constexpr int looks = 200;
  constexpr long yield_ns = 20000000, sleep_ns = 200000;
  for (int i = 0; i < looks; i++) {
    if (done()) return true;
    relax();
  }
  long began = now_ns();
  while (!done()) {
    long waited = now_ns() - began;
    if (waited > limit_ns) return false;
    if (waited < yield_ns) {
      sched_yield();
    } else {
      timespec nap = {0, sleep_ns};  // who is as late as that is busy with something long
      nanosleep(&nap, nullptr);
    }
  }
  return true;
}
