#!/usr/bin/env python
"""Memory of each process of a server against the arithmetic, after the start and after many requests.

    python scripts/bench/memory.py [--model demo] [--tp 2] [--requests 2000] [--kv-cache-memory 512MiB]

Proportional set sizes. What a worker has before it loads anything is seen in a second server, of the same family with
next to no weights and pages, that has answered a request; growth is counted from there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path

from client import Load, measure
from servers import Server, free_port, tpserve

from tpserve import memory
from tpserve.checkpoint.source import describe
from tpserve.parallel.partition import partition
from tpserve.preflight import resolve
from tpserve.settings import Settings

MIB = 1024**2
ONE = Load(1, requests=1, warmup=1, output_tokens=2)
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


def expected(settings: Settings) -> list[float]:
    """MiB of weights and KV pages of each rank."""
    deployment = resolve(settings)
    spec, dtype, pages = deployment.spec, deployment.dtype, deployment.num_pages
    assert pages is not None
    return [
        (memory.weight_bytes(spec, shard, dtype) + pages * memory.page_bytes(spec, shard, dtype, deployment.page_size)) / MIB
        for shard in partition(spec, settings.tp)
    ]


def table(before: dict[str, float], now: dict[str, float], arithmetic: list[float]) -> str:
    """A line a process."""
    lines = [f"{'process':16} {'MiB':>7} {'grown by':>9} {'arithmetic':>11} {'ratio':>6}"]
    for title, size in now.items():
        line = f"{title:16} {size:7.0f}"
        if title.startswith("worker"):
            grown, wanted = size - before[title], arithmetic[int(title.split()[1].split("/")[0])]
            line += f" {grown:9.0f} {wanted:11.0f} {grown / wanted:6.3f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kv-cache-memory", default="512MiB")
    args = parser.parse_args()
    flags = ["--tp", str(args.tp), "--no-enable-prefix-caching"]
    vocabulary = json.loads((describe(Settings(model=args.model)).path / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        small = tpserve(
            small_model(Path(folder), args.model), port, *flags, "--load-format", "dummy", "--kv-cache-memory", "1MiB"
        )
        with Server(*small, port) as server, server.running():
            measure(server.url, ONE, vocabulary)
            before = sizes(server)
    asked = {"model": args.model, "tp": args.tp, "dtype": "bfloat16", "kv_cache_memory": args.kv_cache_memory}
    arithmetic = expected(Settings.model_validate(asked))
    port = free_port()
    with (
        Server(*tpserve(args.model, port, *flags, "--kv-cache-memory", args.kv_cache_memory), port) as server,
        server.running(),
    ):
        measure(server.url, ONE, vocabulary)
        print(f"after the start\n{table(before, sizes(server), arithmetic)}", flush=True)
        measure(server.url, Load(64, requests=args.requests, warmup=0, output_tokens=16), vocabulary)
        print(f"after {args.requests} requests\n{table(before, sizes(server), arithmetic)}")


if __name__ == "__main__":
    main()
