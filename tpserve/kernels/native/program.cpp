#include "program.h"

#include <cstring>

#include "wait.h"

namespace {

template <class Args> const Args& as(const void* args) { return *static_cast<const Args*>(args); }

Part part_of(OpCode code) {
  return code == OP_LINEAR ? PART_LINEAR : code == OP_ATTENTION ? PART_ATTENTION : PART_ROWS;
}

}  // namespace

// Adds the time since the last mark to a part. Only thread 0 keeps time.
class Program::Clock {
 public:
  Clock(double* seconds, Share share) : seconds_(share.thread == 0 ? seconds : nullptr), last_(seconds_ ? now_ns() : 0) {}
  void mark(Part part) {
    if (!seconds_) return;
    long now = now_ns();
    seconds_[part] += (now - last_) * 1e-9;
    last_ = now;
  }

 private:
  double* seconds_;
  long last_;
};

bool Program::run(const Step& step, double* seconds) {
  Run run = {this, &step, seconds, false};
  team_.run(work, &run);
  return !run.failed;
}

void Program::work(void* of, Share share) {
  auto& run = *static_cast<Run*>(of);
  Program& program = *run.program;
  const Step& step = *run.step;
  const Kernels& kernels = program.kernels_;
  Clock clock(run.seconds, share);
  for (const Op& op : program.ops_) {
    switch (op.code) {
      case OP_EMBED: kernels.embed(as<EmbedArgs>(op.args), step, share); break;
      case OP_TURNS: kernels.turns(as<TurnsArgs>(op.args), step, share); break;
      case OP_ROTARY: kernels.rotary(as<RotaryArgs>(op.args), step, share); break;
      case OP_ATTENTION: kernels.attention(as<AttentionArgs>(op.args), step, share); break;
      case OP_NORM: {
        auto& norm = as<NormArgs>(op.args);
        kernels.norm(norm, norm.x, norm.out, step.tokens, share);
        break;
      }
      case OP_LINEAR: {
        auto& linear = as<LinearArgs>(op.args);
        kernels.linear(linear, linear.x, linear.out, step.tokens, share);
        break;
      }
      case OP_REDUCE:
        program.reduce(as<ReduceArgs>(op.args), run, share, clock);
        if (run.failed) return;
        continue;
    }
    clock.mark(part_of(op.code));
    program.meet(clock);
  }
}

void Program::meet(Clock& clock) {
  if (team_.size() == 1) return;  // not even the time is asked for
  team_.barrier();
  clock.mark(PART_WAIT);
}

void Program::reduce(const ReduceArgs& a, Run& run, Share share, Clock& clock) {
  int tokens = run.step->tokens;
  for (int from = 0; from < tokens; from += a.lines) {
    int lines = tokens - from < a.lines ? tokens - from : a.lines;
    void* partial = group_ ? next_slot(*group_) : reinterpret_cast<uint8_t*>(a.partial);
    for (const LinearArgs* product : {a.first, a.second}) {
      if (!product) continue;
      size_t item = product->weight_dtype == BF16 ? 2 : 4;  // of the compute dtype
      auto* x = static_cast<const uint8_t*>(product->x) + size_t(from) * product->x_stride * item;
      kernels_.linear(*product, x, partial, lines, share);
    }
    if (!a.first && share.thread == 0) memset(partial, 0, size_t(lines) * a.hidden * sizeof(float));
    clock.mark(PART_LINEAR);
    meet(clock);
    if (group_) {
      // One thread says for all whether the others came in time: they must leave the program at the same place.
      if (share.thread == 0) {
        arrive(*group_);
        run.failed = !all_arrived(*group_);
        clock.mark(PART_WAIT);
      }
      meet(clock);
      if (run.failed) return;
    }
    finish_lines(a, from, lines, share);
    clock.mark(PART_TRANSFER);
    if (!group_) meet(clock);  // `partial` is written again; slots are used in turn
  }
  if (group_) meet(clock);
}

void Program::finish_lines(const ReduceArgs& a, int from, int lines, Share share) {
  Range mine = part(lines, share);
  for (int64_t i = mine.begin; i < mine.end; i++) {
    float* x = a.x + (from + i) * a.x_stride;
    auto* parts = group_ ? reinterpret_cast<const float*>(slots(*group_)) : a.partial;
    int64_t stride = group_ ? group_->capacity / int64_t(sizeof(float)) : 0;
    kernels_.add(x, a.hidden, parts + i * a.hidden, stride, group_ ? group_->size : 1, a.bias, a.out_norm);
    if (a.next_norm) {
      size_t item = a.next_norm->out_dtype == F32 ? 4 : 2;
      auto* out = static_cast<uint8_t*>(a.next_norm->out) + size_t(from + i) * a.next_norm->out_stride * item;
      kernels_.norm(*a.next_norm, x, out, 1, {0, 1});
    }
  }
}
