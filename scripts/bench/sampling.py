#!/usr/bin/env python
"""What the sampler takes of a step, by kind of row: torch's passes and the native ones in turn, medians of CPU time.

    python scripts/bench/sampling.py [--rows 32] [--columns 24576] [--rounds 15] [--scale 3]

The logits are normal, of standard deviation `scale`: flatter than most models' are, which makes sampling dearer. One thread
on one core; one rank, or a stand-in for two of which the other always says the same, so gathering costs next to nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tpserve.kernels.native.library import NotBuilt, library
from tpserve.parallel.collectives import Alone, Collectives
from tpserve.parallel.partition import Span
from tpserve.worker import masks
from tpserve.worker.native_passes import NativePasses
from tpserve.worker.passes import TORCH, Passes
from tpserve.worker.sampler import Sampler
from tpserve.worker.sampling_rows import SamplingRows


class Twice(Alone):
    """As if there were another rank that does the same."""

    def all_gather(self, x: Tensor) -> Tensor:
        """See Collectives."""
        return torch.stack((x, x))


def sampling_rows(
    count: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, logprobs: int = -1
) -> SamplingRows:
    """Rows of as many requests."""
    return SamplingRows(
        temperatures=np.full(count, temperature, np.float32),
        top_ks=np.full(count, top_k),
        top_ps=np.full(count, top_p, np.float32),
        min_ps=np.full(count, min_p, np.float32),
        seeds=np.arange(count, dtype=np.uint64),
        choices=np.zeros(count, np.int64),
        positions=np.full(count, 200),
        logprobs=np.full(count, logprobs),
    )


def sample(collectives: Collectives, logits: Tensor, rows: SamplingRows) -> Callable[[Passes], Callable[[], object]]:
    """One step of a sampler with the given passes; each has new noise."""

    def make(passes: Passes) -> Callable[[], object]:
        sampler, raw = Sampler(collectives, 0, passes=passes), logits[torch.from_numpy(rows.logprobs >= 0)]

        def step() -> None:
            sampler.sample(logits, rows, 1, b"plan", raw)
            rows.positions[:] += 1

        return step

    return make


def penalize(logits: Tensor, seen: int) -> Callable[[Passes], Callable[[], object]]:
    """Penalties of `seen` ids in each row."""
    count, columns = logits.shape
    index, changed = np.arange(count), logits.clone()
    ids = np.concatenate([np.sort(np.random.default_rng(row).choice(columns, seen, False)) for row in index]).astype(np.int32)
    counts, sizes = (ids % 3).astype(np.int32), np.full(count, seen)
    amounts = np.array([[1.001], [0.0], [0.0]], np.float32).repeat(count, axis=1)
    return lambda passes: lambda: passes.penalize_(changed, index, ids, counts, sizes, amounts)


def mask(logits: Tensor) -> Callable[[Passes], Callable[[], object]]:
    """A grammar's mask in each row."""
    count, columns = logits.shape
    words = np.random.default_rng(0).integers(0, 2**32, (count, -(-columns // 32)), np.uint32)
    changed, index, vocab = logits.clone(), np.arange(count), Span(0, columns)
    return lambda passes: lambda: masks.apply_(changed, index, words, vocab, passes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--columns", type=int, default=24576)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=float, default=3.0)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    forms: dict[str, Passes] = {"torch": TORCH}
    for level in ("avx2", "avx512"):
        try:
            forms[level] = NativePasses(library(level))
        except NotBuilt as error:
            print(f"{level}: {error}")
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((args.rows, args.columns), np.float32) * args.scale)
    alone, twice = Alone(), Twice()
    kinds = {
        "greedy, 1 row": sample(alone, logits[:1], sampling_rows(1)),
        "greedy, 1 row, 2 ranks": sample(twice, logits[:1], sampling_rows(1)),
        "greedy": sample(alone, logits, sampling_rows(args.rows)),
        "greedy, 2 ranks": sample(twice, logits, sampling_rows(args.rows)),
        "temperature 1": sample(twice, logits, sampling_rows(args.rows, 1.0)),
        "top_p 0.95": sample(twice, logits, sampling_rows(args.rows, 1.0, top_p=0.95)),
        "top_p 0.5": sample(twice, logits, sampling_rows(args.rows, 1.0, top_p=0.5)),
        "min_p 0.05": sample(twice, logits, sampling_rows(args.rows, 1.0, min_p=0.05)),
        "top_k 50": sample(twice, logits, sampling_rows(args.rows, 1.0, top_k=50)),
        "top_k 20, top_p 0.95": sample(twice, logits, sampling_rows(args.rows, 1.0, top_k=20, top_p=0.95)),
        "top_k 5000": sample(twice, logits, sampling_rows(args.rows, 1.0, top_k=5000)),
        "greedy, logprobs 5": sample(twice, logits, sampling_rows(args.rows, logprobs=5)),
        "penalties of 500 ids": penalize(logits, 500),
        "masks": mask(logits),
    }
    print(f"{args.rows} rows of {args.columns}, us" + "".join(f"{form:>10}" for form in forms), flush=True)
    with torch.inference_mode():
        for kind, make in kinds.items():
            steps = {form: make(passes) for form, passes in forms.items()}
            took: dict[str, list[float]] = {form: [] for form in forms}
            for round_ in range(args.rounds + 1):
                for form, step in steps.items():
                    began = time.thread_time()
                    step()
                    if round_:
                        took[form].append(time.thread_time() - began)
            print(f"{kind:24}" + "".join(f"{1e6 * statistics.median(times):10.0f}" for times in took.values()), flush=True)


if __name__ == "__main__":
    main()
