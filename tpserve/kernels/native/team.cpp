#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "program.h"
#include "wait.h"

namespace {

constexpr long for_ever_ns = 1L << 62;

void pin(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

void sleep_while(std::atomic<int32_t>& word, int32_t value) {
  syscall(SYS_futex, reinterpret_cast<int32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<int32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<int32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

}  // namespace

Team::Team(int threads, const int32_t* cores) : threads_(threads) {
  helpers_.reserve(threads - 1);
  for (int thread = 1; thread < threads; thread++) helpers_.push_back({this, thread, cores[thread], {}});
  for (auto& helper : helpers_) pthread_create(&helper.id, nullptr, help, &helper);
}

Team::~Team() {
  ending_ = true;
  run_.fetch_add(1, std::memory_order_release);
  wake_all(run_);
  for (auto& helper : helpers_) pthread_join(helper.id, nullptr);
}

void Team::run(void (*work)(void*, Share), void* of) {
  if (threads_ == 1) return work(of, {0, 1});
  work_ = work;
  of_ = of;
  run_.fetch_add(1, std::memory_order_release);
  wake_all(run_);
  work(of, {0, threads_});
  barrier();
}

void Team::barrier() {
  if (threads_ == 1) return;
  int32_t turn = turn_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    turn_.store(turn + 1, std::memory_order_release);
  } else {
    wait_until([&] { return turn_.load(std::memory_order_acquire) != turn; }, for_ever_ns);
  }
}

void* Team::help(void* of) {
  auto& helper = *static_cast<Helper*>(of);
  Team& team = *helper.team;
  pin(helper.core);
  for (int32_t run = 0;; run++) {
    while (team.run_.load(std::memory_order_acquire) == run) sleep_while(team.run_, run);
    if (team.ending_) return nullptr;
    team.work_(team.of_, {helper.thread, team.threads_});
    team.barrier();
  }
}
