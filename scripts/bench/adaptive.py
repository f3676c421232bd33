#!/usr/bin/env python
"""Gaps between tokens as the load steps from 2 to 16 streams, with `--target-itl-ms` and without it, in turns.

    python scripts/bench/adaptive.py [--target-ms 60] [--rounds 3] [--seconds 40] [--plot adaptive.svg]

A stream sends requests one after the other, each with a new random prompt. Gaps and tokens are those between the step and
the end, when no new request is begun. The plot shows the last round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from client import stream
from load import Launched, prompts

BEFORE, AFTER = 2, 16  # streams
BEFORE_S = 8.0
WARMUPS = 3


@dataclass(frozen=True)
class Run:
    """Times in seconds since the load's step; of each token but an answer's first also its gap. Ended after `seconds`."""

    at: np.ndarray
    gaps: np.ndarray
    tokens: int
    seconds: float

    @property
    def p95_ms(self) -> float:
        """The gap that 95 of 100 after the step are within."""
        return float(np.quantile(self.gaps[(self.at >= 0) & (self.at < self.seconds)], 0.95)) * 1000

    @property
    def tok_s(self) -> float:
        """Output tokens per second after the step."""
        return self.tokens / self.seconds


async def load(url: str, input_tokens: int, output_tokens: int, seconds: float) -> Run:
    """The step in the load, and so many seconds after it."""
    answers = []

    async def one_after_the_other(until: float) -> None:
        while time.perf_counter() < until:
            answers.append(await stream(url, prompts(1, input_tokens)[0], output_tokens, model="demo"))

    for _ in range(WARMUPS):
        await one_after_the_other(time.perf_counter() + 0.001)
    answers.clear()
    step = time.perf_counter() + BEFORE_S
    tasks = [asyncio.create_task(one_after_the_other(step + seconds)) for _ in range(BEFORE)]
    await asyncio.sleep(BEFORE_S)
    tasks += [asyncio.create_task(one_after_the_other(step + seconds)) for _ in range(AFTER - BEFORE)]
    await asyncio.gather(*tasks)
    ends = [(b - step, b - a) for answer in answers for a, b in pairwise(answer.events)]
    tokens = sum(0 <= event - step < seconds for answer in answers for event in answer.events)
    at, gaps = np.array(ends).T
    return Run(at, gaps, tokens, seconds)


def measure(args: argparse.Namespace, *flags: str) -> Run:
    """One run against a server of its own."""
    with Launched("--model", "demo", "--tp", str(args.tp), *flags) as server:
        return asyncio.run(load(server.url, args.input_tokens, args.output_tokens, args.seconds))


def plot(path: Path, target_ms: float, free: Run, held: Run) -> None:
    """Each gap as a point over its time, without the target and with it."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, sharey=True, figsize=(9, 6), layout="constrained")
    for axis, run, name in zip(axes, (free, held), ("without the flag", f"--target-itl-ms {target_ms:g}")):
        axis.semilogy(run.at, run.gaps * 1000, ".", markersize=2, rasterized=True)
        axis.axhline(target_ms, color="tab:red", linewidth=1, label=f"target {target_ms:g} ms")
        axis.axhline(run.p95_ms, color="tab:green", linewidth=1, label=f"p95 {run.p95_ms:.0f} ms")
        axis.axvline(0, color="tab:gray", linewidth=1)
        axis.set_title(f"{name}: {run.tok_s:.0f} tokens/s")
        axis.set_ylabel("gap between tokens, ms")
        axis.legend(loc="upper left")
    axes[-1].set_xlabel(f"seconds since {BEFORE} streams became {AFTER}")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target-ms", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--input-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--plot", type=Path, default=Path("adaptive.svg"))
    args = parser.parse_args()
    pairs = []
    for _ in range(args.rounds):
        free, held = measure(args), measure(args, "--target-itl-ms", str(args.target_ms))
        pairs.append((free, held))
        print(
            f"p95 gap {free.p95_ms:.0f} ms without the flag, {held.p95_ms:.0f} ms with it;"
            f" {free.tok_s:.0f} and {held.tok_s:.0f} tok/s, ratio {held.tok_s / free.tok_s:.2f}",
            flush=True,
        )
    ratio = statistics.median(held.tok_s / free.tok_s for free, held in pairs)
    print(f"medians: p95 {statistics.median(held.p95_ms for _, held in pairs):.0f} ms, throughput ratio {ratio:.2f}")
    plot(args.plot, args.target_ms, *pairs[-1])


if __name__ == "__main__":
    main()
