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

// A yield hands the core to who else wants it. If that is a process that computes without end, it is for a whole time slice, at
// every wait anew (and from 6.18 on, Linux takes the rest of one's own for it); a sleeper gets the core back when it wakes. So a
// thread that loses much time by yields sleeps at its waits for a while.
class Yields {
 public:
  bool are_dear(long now) const { return now < dear_until_; }
  void took(long from, long to) {
    if (to - from < 2000000) return;  // as long as that, few of our own processes need the core
    if (from - began_ > 50000000) began_ = from, lost_ = 0;
    lost_ += to - from;
    if (lost_ > 15000000) dear_until_ = to + 200000000, lost_ = 0;
  }

 private:
  long began_ = 0, lost_ = 0, dear_until_ = 0;
};

inline thread_local Yields yields;

// Waits until `done()`; false if that takes longer than `limit_ns`.
template <class Done> bool wait_until(Done done, long limit_ns) {
  constexpr int looks = 200;
  for (int i = 0; i < looks; i++) {
    if (done()) return true;
    relax();
  }
  long began = now_ns(), now = began;
  while (!done()) {
    if (now - began > limit_ns) return false;
    bool is_late = now - began > 20000000;  // busy with something long
    if (is_late || yields.are_dear(now)) {
      timespec nap = {0, is_late ? 200000 : 50000};
      nanosleep(&nap, nullptr);
      now = now_ns();
    } else {
      sched_yield();
      long after = now_ns();
      yields.took(now, after);
      now = after;
    }
  }
  return true;
}
