// A program: the kernels of a forward pass in order, recorded once and run at every step with that step's tokens.
#pragma once

#include <atomic>
#include <pthread.h>
#include <vector>

#include "collective.h"
#include "native.h"

enum OpCode : int32_t { OP_EMBED, OP_NORM, OP_LINEAR, OP_TURNS, OP_ROTARY, OP_ATTENTION, OP_REDUCE };

// Where a run's time went, in seconds: thread 0's. `interface.KINDS`.
enum Part : int32_t { PART_LINEAR, PART_ATTENTION, PART_ROWS, PART_WAIT, PART_TRANSFER };

// The end of a row-parallel layer. The products' sum over the ranks, plus bias, is normed (if so) and added to x; then, if
// the next thing is a norm of x, that is done while its lines are at hand.
struct ReduceArgs {
  const LinearArgs* first;   // into the rank's slot; null: this rank adds nothing
  const LinearArgs* second;  // added to it, where the residual is parallel; or null
  const float* bias;         // (hidden) or null
  const NormArgs* out_norm;  // of the sum, into F32; or null
  const NormArgs* next_norm;  // of x; or null
  float* x;
  float* partial;  // (lines, hidden): stands in for the slot where there is one rank
  int32_t hidden;
  int32_t x_stride;
  int32_t lines;  // most tokens that are reduced at once
};

// The threads of a rank: the one that calls, and helpers, each pinned to a core. Helpers sleep between runs.
class Team {
 public:
  Team(int threads, const int32_t* cores);
  ~Team();
  int size() const { return threads_; }
  void run(void (*work)(void*, Share), void* of);  // calls work(of, share) in every thread, and waits for all of them
  void barrier();

 private:
  struct Helper { Team* team; int thread; int core; pthread_t id; };
  static void* help(void* helper);

  int threads_;
  std::vector<Helper> helpers_;
  void (*work_)(void*, Share) = nullptr;
  void* of_ = nullptr;
  alignas(64) std::atomic<int32_t> run_{0};  // number of the run; helpers sleep on it
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<int32_t> turn_{0};  // of the barrier
  bool ending_ = false;
};

class Program {
 public:
  Program(const Kernels& kernels, Team& team, Group* group) : kernels_(kernels), team_(team), group_(group) {}
  void add(OpCode code, const void* args) { ops_.push_back({code, args}); }
  bool run(const Step& step, double* seconds);  // false if some rank did not arrive

 private:
  struct Op { OpCode code; const void* args; };
  struct Run { Program* program; const Step* step; double* seconds; bool failed; };  // `failed` is thread 0's to write
  class Clock;

  static void work(void* run, Share share);
  void reduce(const ReduceArgs&, Run&, Share, Clock&);
  void meet(Clock&);  // all threads of the team
  void finish_lines(const ReduceArgs&, int from, int lines, Share);

  const Kernels& kernels_;
  Team& team_;
  Group* group_;  // null: one rank
  std::vector<Op> ops_;
};
