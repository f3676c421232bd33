#!/usr/bin/env python
"""The machine's limits, which bound any engine on it: memory read, matrix products, and what a perfect engine would do.

    python scripts/bench/machine.py [--repeats 5]

Memory is read by a small C program, compiled on the spot: one process alone, then one pinned to each core, all at once.
Matrix products are torch's, bfloat16, at the demo model's sizes, likewise. Each figure is the median of the repeats.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

READ = r"""
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Bytes per second of reading 256 MiB in order, again and again for a second, on huge pages where they are to be had. */
int main(void) {
  size_t size = 256u << 20, words = size / 8;
  uint64_t *data = aligned_alloc(2u << 20, size), sum = 0;
  madvise(data, size, MADV_HUGEPAGE);
  for (size_t i = 0; i < words; i++) data[i] = i;
  double began = now(), took;
  long passes = 0;
  do {
    for (size_t i = 0; i < words; i += 8) {
      __builtin_prefetch((char *)(data + i) + 4096);
      sum += (data[i] ^ data[i + 1]) + (data[i + 2] ^ data[i + 3]) + (data[i + 4] ^ data[i + 5]) + (data[i + 6] ^ data[i + 7]);
    }
    passes++;
  } while ((took = now() - began) < 1);
  printf("%f %d\n", passes * (double)size / took, (int)(sum & 1));
}
"""
ROWS = (1, 8, 32, 128, 512)
# (out, in) of the demo model's matrices, of which a rank of two holds about half.
SHAPES = ((1536, 576), (576, 768), (24576, 576))
DEMO_BYTES, DEMO_FLOP = 269e6, 0.27e9  # that a step reads, and that a row of it costs


def read_rate(program: Path, cores: list[int]) -> float:
    """GB/s that one process pinned to each of the cores read together."""
    readers = []
    for core in cores:
        pin = ["taskset", "-c", str(core), str(program)]
        readers.append(subprocess.Popen(pin, stdout=subprocess.PIPE, text=True))
    return sum(float(reader.communicate()[0].split()[0]) for reader in readers) / 1e9


def product_rate(rows: int) -> float:
    """GFLOP/s of torch's product of so many rows with weights that no cache holds, over the shapes, on one thread."""
    torch.set_num_threads(1)
    weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in SHAPES * 3]
    inputs = {shape[1]: torch.randn(rows, shape[1], dtype=torch.bfloat16) for shape in SHAPES}
    flop, began = 0.0, time.perf_counter()
    with torch.inference_mode():
        while time.perf_counter() - began < 0.7:
            for weight in weights:
                functional.linear(inputs[weight.shape[1]], weight)
                flop += 2 * rows * weight.numel()
    return flop / (time.perf_counter() - began) / 1e9


def _pinned(core: int, rows: int, barrier: Barrier, results: Any) -> None:
    os.sched_setaffinity(0, {core})
    barrier.wait()
    results.put(product_rate(rows))


def on_all(cores: list[int], rows: int) -> float:
    """The same, summed over one process pinned to each core."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(cores)), context.Queue()
    workers = [context.Process(target=_pinned, args=(core, rows, barrier, results)) for core in cores]
    for worker in workers:
        worker.start()
    rate = sum(float(results.get()) for _ in workers)
    for worker in workers:
        worker.join()
    return rate


def median(measure: Callable[[], float], repeats: int) -> float:
    """The middle of so many values."""
    return statistics.median(measure() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    memory = 0.0
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "read")
        (source := program.with_suffix(".c")).write_text(READ)
        subprocess.run(["gcc", "-O3", "-march=native", "-o", str(program), str(source)], check=True)
        for count in sorted({1, len(cores)}):
            memory = median(lambda count=count: read_rate(program, cores[:count]), args.repeats)  # type: ignore[misc]
            print(f"memory read, {count} pinned processes: {memory:.1f} GB/s", flush=True)
    best = 0.0
    for rows in ROWS:
        alone = median(lambda rows=rows: on_all(cores[:1], rows), args.repeats)  # type: ignore[misc]
        together = median(lambda rows=rows: on_all(cores, rows), args.repeats)  # type: ignore[misc]
        best = max(best, together)
        print(f"bf16 product, {rows} rows: {alone:.0f} GFLOP/s on one core, {together:.0f} on {len(cores)}", flush=True)
    read_s = DEMO_BYTES / memory / 1e9
    for at_once in (1, 8, 32):
        step_s = max(read_s, at_once * DEMO_FLOP / best / 1e9)
        print(f"perfect engine, demo model, {at_once} at once: at least {1e3 * step_s:.1f} ms a decode step", flush=True)


if __name__ == "__main__":
    main()
