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
// thread that loses much time by yields sleeps at its waits for a while. The rule of `tpserve/parallel/yields.py`.
class Yields {
 public:
  bool are_dear(long now) const { return now < dear_until_; }
  void took(long from, long to) {
    constexpr long short_ns = 1000000, window_ns = 50000000, most_lost_ns = 15000000, dear_ns = 200000000;
    if (to - from < short_ns) return;
    if (from - began_ > window_ns) began_ = from, lost_ = 0;
    lost_ += to - from;
    if (lost_ > most_lost_ns) dear_until_ = to + dear_ns;
  }

 private:
  long began_ = 0, lost_ = 0, dear_until_ = 0;
};

inline thread_local Yields this_threads_yields;

// Waits until `done()`; false if that takes longer than `limit_ns`.
template <class Done> bool wait_until(Done done, long limit_ns) {
  constexpr int looks = 200;
  constexpr long late_ns = 20000000, sleep_ns = 200000, nap_ns = 50000;  // Linux makes a nap about twice as long
  for (int i = 0; i < looks; i++) {
    if (done()) return true;
    relax();
  }
  long began = now_ns(), now = began;
  while (!done()) {
    if (now - began > limit_ns) return false;
    bool is_late = now - began > late_ns;  // who is as late as that is busy with something long
    if (is_late || this_threads_yields.are_dear(now)) {
      timespec nap = {0, is_late ? sleep_ns : nap_ns};
      nanosleep(&nap, nullptr);
      now = now_ns();
    } else {
      sched_yield();
      long after = now_ns();
      this_threads_yields.took(now, after);
      now = after;
    }
  }
  return true;
}
