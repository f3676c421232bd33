#!/usr/bin/env python
"""Memory of each process of a server against the arithmetic, after the start and after many requests.

    python scripts/bench/memory.py [--model demo] [--tp 2] [--requests 2000] [--kv-cache-memory 512MiB]

Proportional set sizes, of each worker beside weights + pool + buffers as `tpserve launch` reckons them. What a worker has
before it loads anything is seen in a second server, of the same family with next to no weights, that has answered a
request; growth is counted from there, and so is the arithmetic. Requests are of mixed lengths, some of them sampled, with
penalties, or with logprobs of answer and prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from client import Load, measure
from servers import Server, free_port, tpserve

from tpserve.checkpoint.source import describe
from tpserve.deployment import Deployment
from tpserve.preflight import resolve
from tpserve.settings import Settings

MIB = 1024**2
ONE = Load(1, requests=1, warmup=1, output_tokens=2)
SAMPLED: dict[str, object] = {"temperature": 1, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.5}
KINDS: tuple[tuple[int, int, dict[str, object]], ...] = (  # tokens in and out, further fields
    (32, 16, {}),
    (500, 4, {}),
    (96, 32, SAMPLED),
    (32, 16, {"logprobs": 5}),
    (96, 8, {"logprobs": 3, "echo": True}),
)
SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}


def sizes(server: Server) -> dict[str, float]:
    """Proportional set size of each process, in MiB, by title."""
    found = {}
    for pid in server.processes():
        title = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
        pss = re.search(r"^Pss: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        assert pss is not None
        found[title.removeprefix("tpserve: ")] = int(pss[1]) / 1024
    return found


def small_model(folder: Path, model: str) -> str:
    """A folder with the model's tokenizer and a config of its family, but next to no weights; load it as dummy."""
    source = describe(Settings(model=model))
    for place in (source.tokenizer, source.path):
        for file in place.glob("*.json"):
            shutil.copy(file, folder)
    config = json.loads((source.path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SMALL))
    return str(folder)


@contextlib.contextmanager
def launched(settings: dict[str, str]) -> Iterator[tuple[Server, Deployment]]:
    """A running server that has answered a request, and what it was made of."""
    port = free_port()
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    resolved = resolve(Settings.model_validate({name.replace("-", "_"): value for name, value in settings.items()}))
    line = tpserve(settings["model"], port, *flags, "--no-enable-prefix-caching")
    with Server(*line, port) as server, server.running():
        measure(server.url, ONE, resolved.spec.vocab_size)
        yield server, resolved


def table(before: dict[str, float], now: dict[str, float], wanted: list[float]) -> str:
    """A line a process."""
    lines = [f"{'process':16} {'MiB':>7} {'grown by':>9} {'arithmetic':>11} {'ratio':>6}"]
    for title, size in now.items():
        line = f"{title:16} {size:7.0f}"
        if title.startswith("worker"):
            grown, expected = size - before[title], wanted[int(title.split()[1].split("/")[0])]
            line += f" {grown:9.0f} {expected:11.0f} {grown / expected:6.3f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tp", default="2")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kv-cache-memory", default="512MiB")
    args = parser.parse_args()
    settings = {"tp": args.tp, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        small = {"model": small_model(Path(folder), args.model), "load-format": "dummy", "kv-cache-memory": "1MiB"}
        with launched(settings | small) as (server, deployment):
            before, small_memory = sizes(server), deployment.memory
    with launched(settings | {"model": args.model, "kv-cache-memory": args.kv_cache_memory}) as (server, deployment):
        wanted = [(rank.total - least.total) / MIB for rank, least in zip(deployment.memory, small_memory)]
        print(f"after the start\n{table(before, sizes(server), wanted)}", flush=True)
        for tokens, answers, more in KINDS:
            measure(server.url, Load(32, args.requests // len(KINDS), 0, tokens, answers), deployment.spec.vocab_size, **more)
        print(f"after {args.requests} requests\n{table(before, sizes(server), wanted)}")


if __name__ == "__main__":
    main()
