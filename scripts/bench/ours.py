#!/usr/bin/env python
"""tpserve against itself, the demo model at TP=2: what sampling costs, and what prefix reuse and speculation save.

    python scripts/bench/ours.py [--row sampling prefix speculation slots] [--rounds 3]

sampling     32 in flight: tok/s at temperature 1 and top_p 0.95 over tok/s of greedy answers
prefix       two requests that share their first 1,024 tokens: the second's time to the first token over the first's
speculation  one request of repetitive text: tok/s with --speculative ngram over tok/s without
slots        32 in flight: the share of the KV slots of held pages in which a token is, on average over the load
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
from collections.abc import Callable, Iterator

import httpx
from client import Load, measure, stream
from load import VOCABULARY, prompts
from servers import Server, free_port, tpserve

FULL = Load(32, requests=96, warmup=32)
SAMPLED = {"temperature": 1, "top_p": 0.95}
PREFIX_TOKENS, OWN_TOKENS = 1024, 16
PHRASE_TOKENS, PHRASES, REPEATED_TOKENS = 24, 8, 128
NGRAM = ("--speculative", "ngram")
PAGE_TOKENS = 16


@contextlib.contextmanager
def launched(*flags: str) -> Iterator[Server]:
    """The demo at TP=2 with more flags; it takes CPU only within its `running`."""
    port = free_port()
    with Server(*tpserve("demo", port, "--tp", "2", *flags), port) as server:
        yield server


def sampling(rounds: int) -> None:
    with launched("--no-enable-prefix-caching") as server, server.running():
        ratios = []
        for _ in range(rounds):
            greedy = measure(server.url, FULL, VOCABULARY).tok_s
            sampled = measure(server.url, FULL, VOCABULARY, **SAMPLED).tok_s
            ratios.append(sampled / greedy)
            print(f"sampling: {sampled:.1f} tok/s, greedy {greedy:.1f}", flush=True)
    show("sampling: tok/s over greedy", ratios)


def prefix(rounds: int) -> None:
    async def first_token_s(url: str, shared: list[int]) -> float:
        answer = await stream(url, shared + prompts(1, OWN_TOKENS)[0], 2)
        return answer.events[0] - answer.began

    with launched() as server, server.running():
        measure(server.url, Load(1, requests=1, warmup=1), VOCABULARY)
        ratios = []
        for _ in range(rounds):
            (shared,) = prompts(1, PREFIX_TOKENS)
            first, second = (asyncio.run(first_token_s(server.url, shared)) for _ in range(2))
            ratios.append(second / first)
            print(f"prefix: first token after {1e3 * first:.0f} ms, of the second request {1e3 * second:.0f} ms", flush=True)
    show("prefix: second TTFT over the first", ratios)


def speculation(rounds: int) -> None:
    """The prompts are phrases of random tokens over and over, with which the demo goes on; each run draws new ones."""

    async def speed(url: str) -> float:
        (phrase,) = prompts(1, PHRASE_TOKENS)
        answer = await stream(url, phrase * PHRASES, REPEATED_TOKENS)
        return (answer.tokens - 1) / (answer.events[-1] - answer.events[0])

    off = "--no-enable-prefix-caching"
    with launched(off) as without, launched(off, *NGRAM) as with_ngram:
        ratios = []
        for number in range(rounds + 1):
            found = []
            for server in (with_ngram, without):
                with server.running():
                    found.append(statistics.median(asyncio.run(speed(server.url)) for _ in range(5)))
            if number:  # the first warms up
                ratios.append(found[0] / found[1])
                print(f"speculation: {found[0]:.1f} tok/s, without {found[1]:.1f}", flush=True)
        with with_ngram.running():
            drafted, accepted = (
                metric(with_ngram.url, f"tpserve_spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted")
            )
    show("speculation: tok/s over tok/s without", ratios)
    print(f"speculation: {accepted:.0f} of {drafted:.0f} drafts were right", flush=True)


def slots(rounds: int) -> None:
    async def run(url: str) -> float:
        tokens = pages = 0.0

        async def one_after_the_other() -> None:
            for prompt in prompts(FULL.requests // FULL.in_flight, FULL.input_tokens):
                await stream(url, prompt, FULL.output_tokens)

        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            work = asyncio.gather(*(one_after_the_other() for _ in range(FULL.in_flight)))
            while not work.done():
                await asyncio.sleep(0.25)
                text = (await client.get("/metrics")).text
                tokens, pages = tokens + value_of("tpserve_kv_tokens", text), pages + value_of("tpserve_kv_pages_used", text)
            await work
        return tokens / (PAGE_TOKENS * pages)

    with launched("--no-enable-prefix-caching") as server, server.running():
        show("slots: share that holds a token", [asyncio.run(run(server.url)) for _ in range(rounds)])


def metric(url: str, name: str) -> float:
    """What the server shows of it now."""
    return value_of(name, httpx.get(f"{url}/metrics", trust_env=False).text)


def value_of(name: str, metrics: str) -> float:
    """Of a metric with one sample, in the exposition format."""
    found = re.search(rf"^{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    if not found:
        raise SystemExit(f"no {name} in /metrics")
    return float(found[1])


def show(what: str, values: list[float]) -> None:
    """Their median and range."""
    print(f"{what}: {statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f}), {len(values)} rounds", flush=True)


ROWS: dict[str, Callable[[int], None]] = {
    "sampling": sampling,
    "prefix": prefix,
    "speculation": speculation,
    "slots": slots,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for row in args.row:
        ROWS[row](args.rounds)


if __name__ == "__main__":
    main()
