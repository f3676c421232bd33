"""Attention over pages: the native kernel of each level against the torch form, on one pinned thread.

    python scripts/bench/attention.py [--rounds 5] [--levels amx,avx512]

Decoding is measured in GB/s of keys and values (each layer has pools of its own, so that none is found in a cache), prefill
in GFLOP/s of the scores that are seen. All take turns; the table has each one's median.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tpserve.kernels import attention
from tpserve.kernels.interface import KINDS
from tpserve.kernels.native.abi import AttentionArgs, Dtype, Op, Step
from tpserve.kernels.native.library import NotBuilt, Program, Team, library

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16}
PAGE_SIZE = 16
CACHED = 256 << 20  # bytes of pools that are read in turn; few caches hold so much
LEVELS = "amx,avx512,avx2,plain"


@dataclass(frozen=True)
class Load:
    """`rows` rows of `count` tokens from position `start`."""

    name: str
    rows: int
    start: int
    count: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def seen(self) -> int:
        """Pairs of a token and one that it sees."""
        ends = range(self.start + 1, self.start + self.count + 1)
        return self.rows * sum(min(end, self.window or end) for end in ends)

    def work(self, itemsize: int) -> tuple[float, str]:
        """What is counted, in a layer."""
        if self.count == 1:
            return 2 * self.seen * self.kv_heads * self.head_dim * itemsize, "GB/s"
        return 4 * self.seen * self.heads * self.head_dim, "GFLOP/s"


LOADS = (
    Load("decode 32 x 192, 9/3 heads of 64", 32, 191, 1, 9, 3, 64),
    Load("decode 1 x 4096, 9/3 heads of 64", 1, 4095, 1, 9, 3, 64),
    Load("decode 8 x 512, 4/1 heads of 256", 8, 511, 1, 4, 1, 256, 512),
    Load("prefill 512 at 0, 9/3 heads of 64", 1, 0, 512, 9, 3, 64),
    Load("prefill 512 at 512, 9/3 heads of 64", 1, 512, 512, 9, 3, 64),
    Load("prefill 512 at 512, 4/1 of 256, window 512", 1, 512, 512, 4, 1, 256, 512),
)


def ways(load: Load, dtype: torch.dtype, levels: list[str]) -> tuple[dict[str, Callable[[], object]], int]:
    """Each way to compute it for a number of layers, and that number."""
    starts, counts = np.full(load.rows, load.start), np.full(load.rows, load.count)
    pages = -(-(load.start + load.count) // PAGE_SIZE)
    tables = torch.randperm(load.rows * pages).view(load.rows, pages).numpy()
    shape = (2, load.rows * pages, load.kv_heads, PAGE_SIZE, load.head_dim)
    layers = max(2, CACHED // (int(np.prod(shape)) * dtype.itemsize)) if load.count == 1 else 2
    pools = torch.randn(shape).to(dtype).expand(layers, *shape).clone()
    query = torch.randn(load.rows * load.count, load.heads, load.head_dim).to(dtype)
    scale = load.head_dim**-0.5
    rows = attention.arrange(starts, counts, tables, PAGE_SIZE, load.window, torch.device("cpu"), dtype)

    def by_torch() -> None:
        for keys, values in pools:
            attention.attend(query, keys, values, rows, scale)

    out = torch.empty_like(query)
    arrays = (np.cumsum(counts) - counts, starts, counts, np.arange(load.rows), tables)
    step = Step(None, None, None, *(array.ctypes.data for array in arrays), pages, len(query), load.rows)
    seconds = (ctypes.c_double * len(KINDS))()
    found: dict[str, Callable[[], object]] = {"torch": by_torch}
    if load.count == 1:
        found["reading alone"] = lambda: pools.view(torch.int32).amax()
    for level in levels:
        try:
            lib = library(level)
        except NotBuilt as error:
            print(error)
            continue
        program = Program(lib, Team(lib, list(os.sched_getaffinity(0))), None)
        for keys, values in pools:
            args = AttentionArgs(
                query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), scale, 0.0, load.window or 0,
                load.heads, load.kv_heads, load.head_dim, PAGE_SIZE, load.heads * load.head_dim, DTYPES[dtype], DTYPES[dtype],
            )  # fmt: skip
            program.add(Op.ATTENTION, args, pools, query, out, arrays)
        found[level] = lambda program=program: program.run(step, seconds)  # type: ignore[misc]
    return found, layers


def main() -> None:
    """Measure, and print one line for each load and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--levels", default=LEVELS)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    for dtype in DTYPES:
        for load in LOADS:
            found, layers = ways(load, dtype, options.levels.split(","))
            times: dict[str, list[float]] = {name: [] for name in found}
            for _ in range(options.rounds):
                for name, run in found.items():
                    # The thread's own time: other processes may want the core.
                    begin = time.thread_time()
                    run()
                    times[name].append((time.thread_time() - begin) / layers)
            amount, unit = load.work(dtype.itemsize)
            rates = "  ".join(f"{name} {amount / statistics.median(all_) / 1e9:.1f}" for name, all_ in times.items())
            print(f"{dtype!s:15} {load.name:42} {unit:8} {rates}")


if __name__ == "__main__":
    main()
