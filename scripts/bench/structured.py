#!/usr/bin/env python
"""What constrained answers and logprobs cost, side by side in one run: alternating rounds, medians, ratios.

    python scripts/bench/structured.py [--tp 2] [--rounds 5]

Every round sends eight requests at once (32 tokens in, 128 out, greedy, bfloat16), four times: plain, one of them under
a JSON schema, all under it, and all with logprobs=5.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import httpx
from load import Launched, complete, prompts

AT_ONCE, INPUT_TOKENS, OUTPUT_TOKENS = 8, 32, 128
# An array that cannot end before the tokens do, so that every id of the answer is chosen under a mask.
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": OUTPUT_TOKENS}
PLAIN: dict[str, Any] = {}
CONSTRAINED: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}}
LOGPROBS: dict[str, Any] = {"logprobs": 5}


def seconds(url: str, requests: list[dict[str, Any]]) -> list[float]:
    """How long each of the requests takes, all sent at once."""

    async def timed(client: httpx.AsyncClient, more: dict[str, Any]) -> float:
        began = time.perf_counter()
        await complete(client, prompts(1, INPUT_TOKENS)[0], OUTPUT_TOKENS, **more)
        return time.perf_counter() - began

    async def run() -> list[float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as client:
            return list(await asyncio.gather(*(timed(client, more) for more in requests)))

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    kinds = {
        "plain": [PLAIN] * AT_ONCE,
        "one constrained": [PLAIN] * (AT_ONCE - 1) + [CONSTRAINED],
        "all constrained": [CONSTRAINED] * AT_ONCE,
        "logprobs=5": [LOGPROBS] * AT_ONCE,
    }
    took: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    with Launched("--model", "demo", "--tp", str(args.tp), "--dtype", "bfloat16") as server:
        for round_ in range(args.rounds + 1):
            for kind, requests in kinds.items():
                found = seconds(server.url, requests)
                if round_:  # the first warms up
                    took[kind].append(found)
    others = AT_ONCE - 1  # the requests that are plain where one is constrained: all kinds are compared by their rows
    print(f"{'of eight at once':18} tok/s a row   cost, median of {args.rounds} rounds")
    for kind, rounds in took.items():
        rows = others if kind == "one constrained" else AT_ONCE
        mean = [statistics.mean(found[:rows]) for found in rounds]
        plain = [statistics.mean(found[:rows]) for found in took["plain"]]
        cost = statistics.median(a / b for a, b in zip(mean, plain)) - 1
        shown = f"{kind} (the others)" if rows == others else kind
        print(f"{shown:30} {OUTPUT_TOKENS / statistics.median(mean):8.1f} {cost:8.1%}", flush=True)


if __name__ == "__main__":
    main()
