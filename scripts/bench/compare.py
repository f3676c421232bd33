#!/usr/bin/env python
"""tpserve against vLLM and llama.cpp, side by side in one run: alternating rounds, medians, ratios.

    python scripts/bench/compare.py [--model demo gemma] [--load 1 8 32 8x1024] [--system tpserve ...] [--rounds 3]
                                    [--json FILE] [--markdown FILE]

scripts/bench/peers.py installs the peers. All servers of a model are up at once, but stopped by signal while another is
measured; each round measures every system under every load. bfloat16, greedy, new random prompts in each run, prefix
reuse off. "others" is the largest share of the CPU that processes apart from server and client took in a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import peers
from client import Figures, Load, measure
from servers import Server, cpu_s, free_port, tpserve

from tests.gemma import gguf_path
from tpserve.checkpoint.source import describe
from tpserve.settings import Settings

LOADS = {
    "1": Load(1, requests=8, warmup=1),
    "8": Load(8, requests=32, warmup=8),
    "32": Load(32, requests=96, warmup=32),
    "8x1024": Load(8, requests=8, warmup=1, input_tokens=1024),
}
MODELS: dict[str, Callable[[], str]] = {"demo": lambda: "demo", "gemma": lambda: str(gguf_path())}
# Of each model, what is measured: system and tensor-parallel size. vLLM cannot split the demo's 9 heads in two.
SYSTEMS = {
    "demo": (("tpserve", 2), ("tpserve", 1), ("vllm", 1), ("llama", 1)),
    "gemma": (("tpserve", 2), ("vllm", 2), ("llama", 1)),
}


@dataclass(frozen=True)
class Run:
    """One measurement."""

    model: str
    load: str
    system: str
    figures: Figures
    others: float  # share of the CPU, 0 to 1


def launch(system: str, tp: int, model: str) -> Server:
    """A server of the system, not started yet."""
    port = free_port()
    if system == "tpserve":
        return Server(*tpserve(model, port, "--tp", str(tp), "--no-enable-prefix-caching"), port)
    return Server(*peers.command(system, model, port, tp), port)


def run(server: Server, load: Load, vocabulary: int) -> tuple[Figures, float]:
    """(figures, share of the CPU that others took meanwhile)."""
    cores = len(os.sched_getaffinity(0))
    with server.running():
        began, busy = time.perf_counter(), cpu_s() - server.cpu_s() - time.process_time()
        found = measure(server.url, load, vocabulary)
        others = cpu_s() - server.cpu_s() - time.process_time() - busy
        return found, max(0.0, others / cores / (time.perf_counter() - began))


def rounds(model: str, loads: list[str], only: list[str], count: int) -> Iterator[Run]:
    """The runs of a model's systems, as they are done."""
    path = MODELS[model]()
    config = json.loads((describe(Settings(model=path)).path / "config.json").read_text())
    with contextlib.ExitStack() as stack:
        up = {}
        for system, tp in SYSTEMS[model]:
            if system in only:
                server = up[f"{system} TP={tp}"] = stack.enter_context(launch(system, tp, path))
                print(f"{model}: {system} TP={tp} took {server.start_s:.1f} s to start", flush=True)
        for number in range(count):
            for load in loads:
                for system, server in up.items():
                    figures, others = run(server, LOADS[load], config["vocab_size"])
                    shown = f"{figures.tok_s:.1f} tok/s, TPOT {figures.tpot_ms:.1f} ms, others {others:.0%}"
                    print(f"round {number + 1}, {model}, {load}: {system} {shown}", flush=True)
                    yield Run(model, load, system, figures, others)


def table(runs: list[Run]) -> str:
    """Markdown: medians over the rounds; of tok/s the range too. The last columns: how many times a row's speed tpserve has."""
    ours = [system for system in dict.fromkeys(run.system for run in runs) if system.startswith("tpserve")]
    head = ["model", "load", "system", "tok/s (min-max)", "TPOT ms", "TTFT ms", "ITL p99 ms", "others"]
    head += [f"{system}: tok/s, TPOT" for system in ours]
    lines = [head, ["---"] * len(head)]
    for model, load, system in dict.fromkeys((run.model, run.load, run.system) for run in runs):
        rows = {
            name: [run for run in runs if (run.model, run.load, run.system) == (model, load, name)] for name in (*ours, system)
        }
        own, speeds = medians(rows[system]), [run.figures.tok_s for run in rows[system]]
        line = [model, load, system, f"{own.tok_s:.1f} ({min(speeds):.1f}-{max(speeds):.1f})", f"{own.tpot_ms:.1f}"]
        line += [f"{own.ttft_ms:.0f}", f"{own.itl_p99_ms:.0f}", f"{max(run.others for run in rows[system]):.0%}"]
        for found in (medians(rows[name]) if rows[name] else None for name in ours):
            line.append(f"{found.tok_s / own.tok_s:.2f}, {own.tpot_ms / found.tpot_ms:.2f}" if found else "")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def medians(runs: list[Run]) -> Figures:
    """Each figure's median over the runs."""
    return Figures(*(statistics.median(getattr(run.figures, field.name) for run in runs) for field in fields(Figures)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--system", nargs="+", choices=["tpserve", *peers.INSTALL], default=["tpserve", *peers.INSTALL])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all runs there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    args = parser.parse_args()
    runs: list[Run] = []
    try:
        for model in args.model:
            runs.extend(rounds(model, args.load, args.system, args.rounds))
    finally:
        report(runs, args.json, args.markdown)


def report(runs: list[Run], as_json: Path | None, as_markdown: Path | None) -> None:
    """What was measured, be it all or not."""
    print(shown := table(runs))
    if as_markdown:
        as_markdown.write_text(f"{shown}\n")
    if as_json:
        described: dict[str, Any] = {"loads": {name: asdict(load) for name, load in LOADS.items()}}
        as_json.write_text(json.dumps({**described, "runs": [asdict(run) for run in runs]}, indent=2))


if __name__ == "__main__":
    main()
