#!/usr/bin/env python
"""How long a second client waits while hostile requests are refused: a completion of one token, over and over.

    python scripts/bench/hostile.py [--tp 2] [--seconds 5]

Each kind of hostile request is sent again and again by one client while another measures; for comparison, nobody else is
there in the first row. The hostile client is a process of its own, so that its work does not hold up the measurement.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator

import httpx
from load import Launched

MB = 10**6
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def _constrained(**constraint: object) -> bytes:
    return json.dumps({"prompt": "x", "structured_outputs": constraint}).encode()


def nested(depth: int) -> dict[str, object]:
    """A schema of objects within objects."""
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}


KINDS = {
    "nobody else": ("", b""),
    "huge n": (COMPLETIONS, b'{"prompt":"x","n":1000000000}'),
    "1,024 answers at once": (COMPLETIONS, b'{"prompt":["x","y","z","u","v","w","q","p"],"n":129}'),
    "deep schema": (COMPLETIONS, _constrained(json=nested(300))),
    "schema of 2,000 properties": (COMPLETIONS, _constrained(json={"properties": {f"p{i}": nested(2) for i in range(1000)}})),
    "catastrophic regex": (COMPLETIONS, _constrained(regex="(a|b)*" * 20 + "(a|b){400}c")),
    "body of 100 MB": (COMPLETIONS, b"x" * (100 * MB)),
    "8 MB of nested lists": (COMPLETIONS, b'{"prompt":"x","zzz":' + b"[" * 4 * MB + b"]" * 4 * MB + b"}"),
    "2 million small lists": (COMPLETIONS, b'{"prompt":[' + b"[1]," * 2 * MB + b"[1]]}"),
    "prompt of 8 MB": (COMPLETIONS, json.dumps({"prompt": "a b " * 2 * MB}).encode()),
    "chat of 9,000 messages": (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": "x" * 800}] * 9000}).encode(),
    ),
}


def attack(url: str, path: str, body: bytes) -> None:
    """Send it for ever."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while True:
            try:
                client.post(path, content=body, headers={"Content-Type": "application/json"})
            except httpx.HTTPError:
                time.sleep(0.01)  # the server has closed on what is too large


def waits(url: str, seconds: float) -> Iterator[float]:
    """What a second client waits for one token, in ms."""
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while time.monotonic() < end:
            began = time.perf_counter()
            client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 1}).raise_for_status()
            yield 1000 * (time.perf_counter() - began)
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5)
    args = parser.parse_args()
    print(f"{'while one sends':28} {'ms: median':>10} {'worst':>8}")
    with Launched("--model", "demo", "--tp", str(args.tp)) as server:
        list(waits(server.url, 1))
        for kind, (path, body) in KINDS.items():
            hostile = multiprocessing.Process(target=attack, args=(server.url, path, body), daemon=True)
            if path:
                hostile.start()
            found = list(waits(server.url, args.seconds))
            if path:
                hostile.kill()
                hostile.join()
            print(f"{kind:28} {statistics.median(found):10.1f} {max(found):8.1f}", flush=True)


if __name__ == "__main__":
    main()
