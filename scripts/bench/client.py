"""A load client for `/v1/completions` of any OpenAI-compatible server: so many streams in flight, each of exact length.

It shares the cores with the server that it measures, so while a run lasts it does nothing but write requests and keep what
comes, with the time; events are read afterwards.

    TTFT  from opening the connection to the first event with a choice
    TPOT  (last event - first event) / (tokens - 1), one per request
    ITL   from one event to the next, over all requests
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from load import prompts

_EVENT = re.compile(rb"^data: (.*?)\r?\n", re.MULTILINE)


@dataclass(frozen=True)
class Load:
    """A closed loop: the next request is sent when one of those in flight ends. Prompts are drawn anew in each run."""

    in_flight: int
    requests: int
    warmup: int  # unmeasured requests of the same shape, sent first
    input_tokens: int = 128
    output_tokens: int = 64


@dataclass(frozen=True)
class Answer:
    """One stream: the tokens that the server's `usage` counts, when the request began and when each event came, in s."""

    prompt_tokens: int
    tokens: int
    began: float
    events: list[float]


@dataclass(frozen=True)
class Figures:
    """What a run shows. All but `tok_s`, output tokens per second, are in ms; medians over requests or gaps."""

    tok_s: float
    ttft_ms: float
    tpot_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


class _Stream(asyncio.Protocol):
    """A request on a connection of its own, which the server closes. Keeps what comes as (time, bytes)."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]):
        self._request = request
        self._ended = ended
        self.pieces: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(exc)


async def stream(url: str, prompt: list[int], output_tokens: int, **more: Any) -> Answer:
    """A request to http://HOST:PORT, its stream read to the end. Raises SystemExit unless it has just so many tokens."""
    body = {"model": "peer", "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, **more}
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    began = time.perf_counter()
    _, protocol = await loop.create_connection(lambda: _Stream(request, ended), host, int(port))
    await ended
    answer = read(began, protocol.pieces)
    if (answer.prompt_tokens, answer.tokens) != (len(prompt), output_tokens):
        counts = f"{answer.prompt_tokens} + {answer.tokens}"
        raise SystemExit(f"{url} counts {counts} tokens, not {len(prompt)} + {output_tokens}")
    return answer


def read(began: float, pieces: list[tuple[float, bytes]]) -> Answer:
    """The answer in what came. An event is stamped with the piece that ends it. Raises SystemExit if it is not whole."""
    raw = b"".join(data for _, data in pieces)
    if not raw.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in raw:
        raise SystemExit(f"not a whole stream: {raw[:300].decode(errors='replace')}")
    usage: dict[str, int] = {}
    events: list[float] = []
    for at, event in _stamped(raw, pieces):
        usage = event.get("usage") or usage
        choices = event.get("choices")
        # Some servers close with an event that says why, and has no token.
        if choices and (choices[0]["text"] or not choices[0].get("finish_reason") or not events):
            events.append(at)
    if not usage:
        raise SystemExit("no usage in the stream: the server gave up")
    return Answer(usage["prompt_tokens"], usage["completion_tokens"], began, events)


def _stamped(raw: bytes, pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, Any]]:
    """Each event with the time at which its last byte came. Servers send an event as one chunk, so no chunk's head is in it."""
    arrivals = iter(pieces)
    at, data = next(arrivals)
    received = len(data)
    for match in _EVENT.finditer(raw):
        while received < match.end():
            at, data = next(arrivals)
            received += len(data)
        if match[1] != b"[DONE]":
            yield at, json.loads(match[1])


async def _loop(url: str, load: Load, count: int, vocabulary: int, more: dict[str, Any]) -> tuple[list[Answer], float]:
    """(answers to so many requests, seconds it took)."""
    waiting = iter(prompts(count, load.input_tokens, vocabulary))
    answers = []

    async def one_after_the_other() -> None:
        for prompt in waiting:
            answers.append(await stream(url, prompt, load.output_tokens, **more))

    began = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(load.in_flight)))
    return answers, time.perf_counter() - began


def measure(url: str, load: Load, vocabulary: int, **more: Any) -> Figures:
    """One run of the load, with `more` fields in each request's body."""

    async def run() -> tuple[list[Answer], float]:
        await _loop(url, load, load.warmup, vocabulary, more)
        return await _loop(url, load, load.requests, vocabulary, more)

    return figures(*asyncio.run(run()))


def figures(answers: list[Answer], seconds: float) -> Figures:
    """What the answers, which took so long together, amount to. An answer has two tokens or more."""
    gaps = sorted(b - a for answer in answers for a, b in pairwise(answer.events)) or [0.0]
    return Figures(
        tok_s=sum(answer.tokens for answer in answers) / seconds,
        ttft_ms=1e3 * statistics.median(answer.events[0] - answer.began for answer in answers),
        tpot_ms=1e3 * statistics.median((a.events[-1] - a.events[0]) / (a.tokens - 1) for a in answers),
        itl_p50_ms=1e3 * statistics.median(gaps),
        itl_p99_ms=1e3 * gaps[int(0.99 * (len(gaps) - 1))],
    )
