#!/usr/bin/env python
"""Gaps of running streams while a long prompt is prefilled in chunks, against the steps that hold a chunk.

    python scripts/bench/gaps.py [--streams 4] [--prompt-tokens 4000] [--tp 2]

A step that holds a chunk is seen by a stream as one gap, so the median gap during the prefill is the median
step; the worst gap must stay within three of it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time

import httpx
from load import Launched, prompts

STREAM_TOKENS = 400


async def stream(client: httpx.AsyncClient, stamps: list[float], stop: asyncio.Event) -> None:
    """Read one stream until told to stop; a time stamp for each event."""
    body = {"prompt": prompts(1, 32)[0], "max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                stamps.append(time.perf_counter())
            if stop.is_set():
                return


async def measure(url: str, streams: int, prompt_tokens: int) -> tuple[list[float], float]:
    """(gaps of all streams during the prefill, seconds of the prefill)."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as client:
        stamps: list[list[float]] = [[] for _ in range(streams)]
        stop = asyncio.Event()
        tasks = [asyncio.create_task(stream(client, times, stop)) for times in stamps]
        while min(map(len, stamps)) < 20:
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        body = {"prompt": prompts(1, prompt_tokens)[0], "max_tokens": 1, "temperature": 0}
        (await client.post("/v1/completions", json=body)).raise_for_status()
        ended = time.perf_counter()
        stop.set()
        await asyncio.gather(*tasks)
    gaps = [b - a for times in stamps for a, b in itertools.pairwise(times) if b > began and a < ended]
    return gaps, ended - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with Launched("--model", "demo", "--tp", str(args.tp)) as server:
        for _ in range(args.rounds):
            gaps, seconds = asyncio.run(measure(server.url, args.streams, args.prompt_tokens))
            middle, worst = statistics.median(gaps), max(gaps)
            print(
                f"prefill of {args.prompt_tokens} tokens {seconds:.2f} s, {len(gaps)} gaps: median {middle * 1e3:.0f} ms,"
                f" worst {worst * 1e3:.0f} ms, ratio {worst / middle:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
