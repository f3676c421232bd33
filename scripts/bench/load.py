"""What the benchmarks share: a server to measure, prompts that no cache has seen, and requests at a given concurrency."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

import httpx

VOCABULARY = 49152  # the demo model's
FIRST_PLAIN_ID = 256  # below are mostly special and single-byte tokens


class Launched:
    """`tpserve launch` on a free port, for the length of a `with` block."""

    def __init__(self, *args: str):
        self.args = args

    def __enter__(self) -> Launched:
        command = [sys.executable, "-m", "tpserve.cli", "launch", "--port", "0", "--log-level", "warning", *self.args]
        began = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.start_s = time.perf_counter() - began
        if not line.startswith("ready "):
            raise SystemExit(f"the server did not start: {' '.join(command)}")
        self.url = line.split()[1]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(60)


def prompts(count: int, tokens: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Random token ids, new at each call."""
    return [random.choices(range(FIRST_PLAIN_ID, vocabulary), k=tokens) for _ in range(count)]


async def complete(client: httpx.AsyncClient, prompt: list[int], output_tokens: int, **more: Any) -> None:
    """One whole completion of exactly so many tokens."""
    body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, **more}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    if answer.json()["usage"]["completion_tokens"] != output_tokens:
        raise SystemExit(f"wanted {output_tokens} tokens: {answer.text[:200]}")


def latencies(url: str, requests: list[tuple[list[int], int]]) -> list[float]:
    """Seconds until each of the requests, (prompt, output tokens), is answered, all sent at once."""

    async def timed(client: httpx.AsyncClient, prompt: list[int], output_tokens: int) -> float:
        began = time.perf_counter()
        await complete(client, prompt, output_tokens)
        return time.perf_counter() - began

    async def run() -> list[float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as client:
            return list(await asyncio.gather(*(timed(client, *request) for request in requests)))

    return asyncio.run(run())


def throughput(url: str, requests: list[tuple[list[int], int]]) -> float:
    """Output tokens per second of all the requests, sent at once."""
    return sum(tokens for _, tokens in requests) / max(latencies(url, requests))
