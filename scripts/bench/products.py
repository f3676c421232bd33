#!/usr/bin/env python
"""Products of bfloat16 weights: native kernels of each level against torch's (oneDNN, packed), on one pinned core.

    python scripts/bench/products.py [--shape 1536x576] [--rows 1,4,8,32,128,512] [--processes 1] [--megabytes 640]

Weights are taken in turn out of so many megabytes that no cache holds them. For few rows the speed at which weights are
read counts (GB/s), beside that of a plain sum over the same bytes; for many, GFLOP/s. Medians of alternating rounds, in
the core's own time, so that other processes on it count only by the caches and the memory that they use.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from ctypes import c_double
from itertools import cycle
from multiprocessing import get_context

import torch
from torch import Tensor

from tpserve.kernels.interface import KINDS
from tpserve.kernels.native.abi import Dtype, LinearArgs, Op, Step
from tpserve.kernels.native.library import NotBuilt, Program, Team, library

ROUNDS, SECONDS = 5, 0.06  # of each kernel at each number of rows
FEW = 16  # rows; up to here GB/s are told


def native_products(level: str, weights: list[Tensor], x: Tensor) -> Callable[[], object] | None:
    """A product with the next weight (n, k) at each call; None if this machine has no such level."""
    try:
        lib = library(level)
    except NotBuilt:
        return None
    team, seconds, step = Team(lib, [0]), (c_double * len(KINDS))(), Step(tokens=len(x))
    n, k = weights[0].shape
    out = torch.empty(len(x), n, dtype=torch.bfloat16)
    programs = []
    for weight in weights:
        program = Program(lib, team, None)
        pointers = x.data_ptr(), out.data_ptr(), weight.data_ptr(), None
        args = LinearArgs(*pointers, 1.0, n, k, x.stride(0), n, Dtype.BF16, Dtype.BF16, 0, 0, 0)
        program.add(Op.LINEAR, args, x, out)
        programs.append(program)
    turn = cycle(programs)
    return lambda: next(turn).run(step, seconds)


def torch_products(weights: list[Tensor], x: Tensor) -> Callable[[], object]:
    """The same with weights that oneDNN has packed."""
    turn = cycle(weights)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, next(turn), None, "none", [], "")


def reads(weights: list[Tensor]) -> Callable[[], object]:
    """A sum over the next weight's bytes."""
    turn = cycle([weight.view(torch.int64).flatten() for weight in weights])
    return lambda: next(turn).sum()


def calls_per_second(product: Callable[[], object]) -> float:
    """Of this thread's own time."""
    began, calls = time.thread_time(), 0
    while (spent := time.thread_time() - began) < SECONDS:
        product()
        calls += 1
    return calls / spent


def huge(count: int, n: int, k: int) -> list[Tensor]:
    """Weights on huge pages, as far as the kernel has them: small ones cost most of the memory's speed on some machines."""
    memory = mmap.mmap(-1, count * n * k * 2, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return list(torch.frombuffer(memory, dtype=torch.bfloat16).view(count, n, k))


def measure(core: int, n: int, k: int, rows: list[int], megabytes: int) -> None:
    """Print a line for each number of rows."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    weights = huge(max(2, megabytes * 10**6 // (n * k * 2)), n, k)  # any order of the values is as fast as the packed one
    source = torch.randn(n, k).bfloat16()
    for weight in weights:
        weight.copy_(source)
    packed = [torch.ops.mkldnn._reorder_linear_weight(source, None) for _ in weights]
    for count in rows:
        x = torch.randn(count, k).bfloat16()
        kernels = {level: native_products(level, weights, x) for level in ("avx2", "avx512", "amx")}
        kernels |= {"torch": torch_products(packed, x), "read": reads(weights) if count <= FEW else None}
        there = {name: kernel for name, kernel in kernels.items() if kernel}
        for kernel in there.values():
            kernel()  # oneDNN compiles at the first call
        rounds = [{name: calls_per_second(kernel) for name, kernel in there.items()} for _ in range(ROUNDS)]
        speeds = {name: statistics.median(each[name] for each in rounds) for name in there}
        work, unit = (n * k * 2e-9, "GB/s") if count <= FEW else (2e-9 * count * n * k, "GFLOP/s")
        told = "  ".join(f"{name} {work * speed:.1f}" for name, speed in speeds.items())
        print(f"core {core}  {n} x {k}, {count} rows, {unit}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="1536x576", help="outputs x inputs, inputs a multiple of 32, outputs of 16")
    parser.add_argument("--rows", default="1,4,8,32,128,512")
    parser.add_argument("--processes", type=int, default=1, help="at once, each on a core of its own")
    parser.add_argument("--megabytes", type=int, default=640, help="of weights, in each of two layouts and each process")
    args = parser.parse_args()
    n, k = map(int, args.shape.split("x"))
    if n % 16 or k % 32:
        parser.error("--shape: outputs must be a multiple of 16 and inputs one of 32")
    try:
        library()
    except NotBuilt as error:
        parser.error(str(error))
    rows = [int(count) for count in args.rows.split(",")]
    cores = sorted(os.sched_getaffinity(0))[: args.processes]
    children = [
        get_context("spawn").Process(target=measure, args=(core, n, k, rows, args.megabytes), daemon=True) for core in cores
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()


if __name__ == "__main__":
    main()
