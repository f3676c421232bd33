#!/usr/bin/env python
"""What the coordinator spends on a step in which all rows decode: each part's median and mean, in microseconds.

    python scripts/bench/coordinator.py [--rows 256] [--steps 2000] [--ranks 2]

Answers are at different places of their pages and none ends. The parts are called as the process calls them, and messages go
through sockets of its kind. Means show what others on the machine take.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import zmq

from tpserve.coordinator.capacity import Capacity
from tpserve.coordinator.scheduler import Scheduler
from tpserve.messages import NO_SCORES, STEP_PARTS, Row, Sampling, StepPlan, StepResult, Submit, decode, encode

VOCABULARY = 49152
PAGE_SIZE = 16
EPOCH = 1
NONE = np.empty(0, np.int32)
_T = TypeVar("_T")


class Stopwatch:
    """Collects the durations of named parts, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, part: str, work: Callable[[], _T]) -> _T:
        """What `work` returns."""
        began = time.perf_counter()
        result = work()
        self.seconds[part].append(time.perf_counter() - began)
        return result


def submit(request: int, prompt_tokens: int, output_tokens: int) -> Submit:
    """One greedy choice with an end id that never comes."""
    return Submit(
        request=request,
        group=request,
        prompt=np.arange(prompt_tokens, dtype=np.int32),
        choices=np.zeros(1, np.uint16),
        generated=[NONE],
        max_tokens=output_tokens,
        min_tokens=0,
        stop_ids=np.array([2], np.int32),
        sampling=Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, seed=request),
        bias_ids=NONE,
        bias_values=np.empty(0, np.float32),
        logprobs=-1,
        prompt_logprobs=-1,
        grammar="",
        priority=0,
        max_wait_s=0.0,
        cache_salt=str(request),
    )


def filled(rows: int, steps: int) -> Scheduler:
    """A scheduler with so many choices, none of which has begun."""
    most = PAGE_SIZE * 8 + steps + 16
    capacity = Capacity(
        num_pages=rows * (most // PAGE_SIZE + 1) + 64,
        page_size=PAGE_SIZE,
        max_model_len=most,
        max_num_seqs=rows,
        max_num_batched_tokens=max(512, 2 * rows),
        chunked_prefill=True,
        prefix_caching=True,
        by_priority=False,
        max_queue=None,
    )
    scheduler = Scheduler(capacity, b"secret", VOCABULARY)
    for request in range(rows):
        prompt_tokens = PAGE_SIZE * 7 + request % PAGE_SIZE
        assert scheduler.submit(submit(request, prompt_tokens, most - prompt_tokens)) is None
    return scheduler


class Wire:
    """Sockets as the coordinator has them, and the other ends."""

    def __init__(self, ranks: int, folder: str):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.ranks = [str(rank).encode() for rank in range(ranks)]
        self._plans, self._requests = context.socket(zmq.ROUTER), context.socket(zmq.PAIR)
        self._plans.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._plans.bind(f"ipc://{folder}/plans")
        self._requests.bind(f"ipc://{folder}/requests")
        self._ends = [context.socket(zmq.PAIR), *(context.socket(zmq.DEALER) for _ in self.ranks)]
        self._ends[0].connect(f"ipc://{folder}/requests")
        for rank, end in zip(self.ranks, self._ends[1:]):
            end.setsockopt(zmq.IDENTITY, rank)
            end.connect(f"ipc://{folder}/plans")
            end.send(b"hello")
            self._plans.recv_multipart()

    def to_workers(self, data: bytes) -> None:
        """The same bytes to each rank."""
        for rank in self.ranks:
            self._plans.send(rank, zmq.SNDMORE)
            self._plans.send(data)

    def to_frontend(self, data: bytes) -> None:
        """One message."""
        self._requests.send(data)

    def drain(self) -> None:
        """What was sent has come."""
        for end in self._ends:
            while end.poll(0):
                end.recv()


def result_of(plan: StepPlan) -> bytes:
    """What rank 0 answers."""
    samples = int(np.count_nonzero(plan.flags & Row.SAMPLE))
    ids = np.arange(plan.step, plan.step + samples, dtype=np.int32) % 40000 + 100
    return encode(
        StepResult(
            plan.step, ids, np.empty(0, np.uint8), 0, NO_SCORES, NO_SCORES, np.zeros(len(STEP_PARTS), np.float32), 61, 1
        ),
        EPOCH,
    )


def measure(rows: int, steps: int, wire: Wire) -> Stopwatch:
    """So many steps of `rows` decode rows each, two plans in flight."""
    scheduler, watch = filled(rows, steps), Stopwatch()
    answers: deque[bytes] = deque()
    while len(watch.seconds["decode result"]) < steps:
        while (plan := watch.time("plan", scheduler.plan)) is not None:
            data = watch.time("encode plan", partial(encode, plan, EPOCH))
            watch.time(f"send plan to {len(wire.ranks)}", partial(wire.to_workers, data))
            answers.append(result_of(plan))
            if len(plan.ids):  # a step with prompts
                watch = Stopwatch()
        del watch.seconds["plan"][-1]  # of the plan that the window did not allow
        _, result = watch.time("decode result", partial(decode, answers.popleft()))
        assert isinstance(result, StepResult)
        outcome = watch.time("apply result", partial(scheduler.result, result))
        data = watch.time("encode tokens", partial(encode, outcome.tokens, EPOCH))
        watch.time("send tokens", partial(wire.to_frontend, data))
        wire.drain()
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        watch = measure(args.rows, args.steps, Wire(args.ranks, folder))
        zmq.Context.instance().destroy(linger=0)
    total = np.zeros(2)
    print(f"{'microseconds':>15}  median    mean")
    for part, seconds in watch.seconds.items():
        figures = np.array([statistics.median(seconds), statistics.mean(seconds)]) * 1e6
        total += figures
        print(f"{part:>15} {figures[0]:7.1f} {figures[1]:7.1f}")
    print(f"{'all':>15} {total[0]:7.1f} {total[1]:7.1f}")


if __name__ == "__main__":
    main()
