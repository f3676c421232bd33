#!/usr/bin/env python
"""What it takes ranks to add up 4 KiB: in the memory that workers share, beside gloo.

    python scripts/bench/allreduce.py [--bytes 4096] [--rounds 3] [--json]

Ranks are processes, each pinned to a core, two or four of them on two cores. `program` is what a step pays: the reductions
of a recorded program, run back to back by one call; its figures are over programs, each divided by its reductions. `calls`
and `gloo` are single calls from Python, as any backend takes them. Microseconds, over all ranks; systems take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch

from tpserve.kernels.interface import KINDS
from tpserve.kernels.native.abi import Op, ReduceArgs, Step
from tpserve.kernels.native.library import Program, Team, library
from tpserve.parallel import segment
from tpserve.parallel.backends import Kind, open_collectives
from tpserve.parallel.shared_memory_native import NativeSharedMemory

REDUCTIONS = 60  # of the demo model's step
SECONDS = 0.5  # of each measurement
LIMIT_S = 30.0
SYSTEMS = ("program", "calls", "gloo")
SIZES = (2, 4)
WANTED = {2: "<= 6, <= 60", 4: "<= 60"}


def program(collectives: NativeSharedMemory, x: torch.Tensor, core: int) -> Callable[[], None]:
    """A step of nothing but reductions of x, as `NativeKernels` records them where a rank has no product."""
    lib, values = library(), x.numel()
    recorded = Program(lib, Team(lib, [core]), collectives.group)
    for _ in range(REDUCTIONS):
        recorded.add(Op.REDUCE, ReduceArgs(None, None, None, None, None, x.data_ptr(), None, values, values, 1), x)
    step, seconds = Step(tokens=1), (ctypes.c_double * len(KINDS))()

    def run() -> None:
        if not recorded.run(step, seconds):
            raise collectives.missing()

    return run


def one_rank(system: str, rank: int, size: int, core: int, memory_fd: int, store_path: str, value_bytes: int) -> list[float]:
    """Microseconds of each reduction, or of each of a program's."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    kind: Kind = "gloo" if system == "gloo" else "native"
    collectives = open_collectives(kind, rank, size, limit_s=LIMIT_S, store_path=store_path, memory_fd=memory_fd)
    x, count = torch.zeros(value_bytes // 4), 1

    def call() -> None:
        collectives.all_reduce_(x)

    if system == "program":
        assert isinstance(collectives, NativeSharedMemory)
        call, count = program(collectives, x, core), REDUCTIONS
    took = []
    for _ in range(repeats(call, collectives.all_reduce_)):
        began = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - began) / 1e3 / count)
    return took


def repeats(call: Callable[[], None], all_reduce_: Callable[[torch.Tensor], None]) -> int:
    """How many calls take about SECONDS: the same on all ranks. Warms up, too."""
    for _ in range(20):
        call()
    began = time.perf_counter()
    for _ in range(50):
        call()
    slowest = torch.tensor([time.perf_counter() - began])
    all_reduce_(slowest)
    return 50 + int(50 * SECONDS / slowest.item())


def measure(system: str, size: int, value_bytes: int) -> list[float]:
    """The times of a group of new processes."""
    processes, cores = get_context("fork"), sorted(os.sched_getaffinity(0))[:2]
    memory_fd = segment.create(size)
    with tempfile.TemporaryDirectory() as folder:
        pipes, children = [], []
        for rank in range(size):
            mine, theirs = processes.Pipe(duplex=False)
            args = system, rank, size, cores[rank % len(cores)], memory_fd, f"{folder}/store", value_bytes
            children.append(processes.Process(target=lambda pipe, *args: pipe.send(one_rank(*args)), args=(theirs, *args)))
            children[-1].start()
            theirs.close()
            pipes.append(mine)
        took = [each for pipe in pipes for each in pipe.recv()]
        for child in children:
            child.join()
    os.close(memory_fd)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    took: dict[tuple[str, int], list[float]] = {(system, size): [] for size in SIZES for system in SYSTEMS}
    for _ in range(args.rounds):
        for system, size in took:
            took[system, size] += measure(system, size, args.bytes)
    if not args.json:
        print(f"{'ranks':>5}  {'':8} {'p50 us':>8} {'p99 us':>8}  wanted")
    rows = []
    for (system, size), times in took.items():
        cuts = statistics.quantiles(times, n=100)
        rows.append({"ranks": size, "system": system, "p50_us": cuts[49], "p99_us": cuts[98]})
        if not args.json:
            print(f"{size:>5}  {system:8} {cuts[49]:8.1f} {cuts[98]:8.1f}  {'' if system == 'gloo' else WANTED[size]}")
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
