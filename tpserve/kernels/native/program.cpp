#include "program.h"

#include <cstring>

#include "wait.h"

namespace {

// Adds the time since the last mark to a part. Only thread 0 keeps time.
class Clock {
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

template <class Args> const Args& as(const void* args) { return *static_cast<const Args*>(args); }

Part part_of(OpCode code) {
  return code == OP_LINEAR ? PART_LINEAR : code == OP_ATTENTION ? PART_ATTENTION : PART_ROWS;
}

}  // namespace

bool Program::run(const Step& step, double* seconds) {
  Run run = {this, &step, seconds, {false}};
  team_.run(work, &run);
  return !run.failed;
}

void Program::work(void* of, Share share) {
  auto& run = *static_cast<Run*>(of);
  Program& program = *run.program;
  const Step& step = *run.step;
  const Kernels& kernels = program.kernels_;
  for (const Op& op : program.ops_) {
    Clock clock(run.seconds, share);
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
        if (!program.reduce(as<ReduceArgs>(op.args), step, share, run.seconds)) run.failed = true;
        program.team_.barrier();
        if (run.failed) return;
        continue;
    }
    clock.mark(part_of(op.code));
    program.team_.barrier();
  }
}

bool Program::reduce(const ReduceArgs& a, const Step& step, Share share, double* seconds) {
  for (int from = 0; from < step.tokens; from += a.lines) {
    Clock clock(seconds, share);
    int lines = step.tokens - from < a.lines ? step.tokens - from : a.lines;
    void* partial = group_ ? next_slot(*group_) : reinterpret_cast<uint8_t*>(a.partial);
    for (const LinearArgs* product : {a.first, a.second}) {
      if (!product) continue;
      size_t item = product->weight_dtype == BF16 ? 2 : 4;  // of the compute dtype
      auto* x = static_cast<const uint8_t*>(product->x) + size_t(from) * product->x_stride * item;
      kernels_.linear(*product, x, partial, lines, share);
    }
    if (!a.first && share.thread == 0) memset(partial, 0, size_t(lines) * a.hidden * sizeof(float));
    clock.mark(PART_LINEAR);
    team_.barrier();
    if (group_) {
      if (share.thread == 0) arrive(*group_);
      team_.barrier();
      if (!all_arrived(*group_)) return false;
    }
    clock.mark(PART_WAIT);
    finish_lines(a, from, lines, share);
    clock.mark(PART_TRANSFER);
    if (!group_) team_.barrier();  // `partial` is written again; slots are used in turn
  }
  return true;
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
