#!/usr/bin/env python
"""tpserve against `transformers.generate`, side by side in one run: alternating rounds, medians, ratios.

    python scripts/bench/against_transformers.py [--row uniform mixed beside] [--model demo] [--tp 2] [--rounds 3]

Every round sends new random prompts, greedy, bfloat16.
uniform  128 tokens in, 64 out, at 1, 8 and 32 at once; `generate` gets as many as one batch, and the first 4 one by one
mixed    256 requests at once, 16 to 512 tokens in and 16 to 128 out; `generate` gets every 16th, one by one
beside   nine of 50 in, 50 out beside one of 4,000 in: the nine's mean latency; `generate` gets all ten as one padded batch
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import torch
from load import Launched, latencies, prompts, throughput
from transformers import AutoModelForCausalLM

from tpserve.checkpoint.source import describe
from tpserve.settings import Settings

INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
SERIAL_REQUESTS = 4
MIXED_REQUESTS, MIXED_EVERY = 256, 16
SHORT, LONG_TOKENS, SHORT_TOKENS = 9, 4000, 50


def generate(model: torch.nn.Module, batch: list[list[int]], output_tokens: int) -> float:
    """Seconds of one call of `generate`, whose prompts are padded to the longest."""
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=output_tokens, min_new_tokens=output_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    if out.shape[1] != width + output_tokens:
        raise SystemExit(f"generate gave {out.shape[1]} tokens")
    return time.perf_counter() - began


def uniform(url: str, model: torch.nn.Module, rounds: int) -> None:
    print("at once   tpserve tok/s   batched   serial   ratio to batched   ratio to serial")
    for count in (1, 8, 32):
        ours, batched, alone = [], [], []
        for _ in range(rounds):
            batch = prompts(count, INPUT_TOKENS)
            ours.append(throughput(url, [(prompt, OUTPUT_TOKENS) for prompt in batch]))
            batched.append(count * OUTPUT_TOKENS / generate(model, batch, OUTPUT_TOKENS))
            few = batch[:SERIAL_REQUESTS]
            alone.append(len(few) * OUTPUT_TOKENS / sum(generate(model, [prompt], OUTPUT_TOKENS) for prompt in few))
        a, b, c = (statistics.median(values) for values in (ours, batched, alone))
        print(f"{count:7} {a:15.1f} {b:9.1f} {c:8.1f} {a / b:18.2f} {a / c:17.2f}", flush=True)


def mixed(url: str, model: torch.nn.Module, rounds: int) -> None:
    ours, alone = [], []
    for _ in range(rounds):
        requests = [(prompts(1, random.randint(16, 512))[0], random.randint(16, 128)) for _ in range(MIXED_REQUESTS)]
        ours.append(throughput(url, requests))
        few = requests[::MIXED_EVERY]
        alone.append(sum(tokens for _, tokens in few) / sum(generate(model, [prompt], tokens) for prompt, tokens in few))
    a, b = statistics.median(ours), statistics.median(alone)
    print(f"{MIXED_REQUESTS} of mixed lengths: {a:.1f} tok/s, serial {b:.1f}, ratio {a / b:.2f}", flush=True)


def beside(url: str, model: torch.nn.Module, rounds: int) -> None:
    ours, padded = [], []
    for _ in range(rounds):
        batch = prompts(1, LONG_TOKENS) + prompts(SHORT, SHORT_TOKENS)
        ours.append(statistics.mean(latencies(url, [(prompt, SHORT_TOKENS) for prompt in batch])[1:]))
        padded.append(generate(model, batch, SHORT_TOKENS))
    a, b = statistics.median(ours), statistics.median(padded)
    print(f"{SHORT} beside one of {LONG_TOKENS}: {a:.2f} s, padded batch {b:.2f} s, {1 - a / b:.0%} lower", flush=True)


ROWS: dict[str, Callable[[str, torch.nn.Module, int], None]] = {"uniform": uniform, "mixed": mixed, "beside": beside}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(describe(Settings(model=args.model)).path, dtype=torch.bfloat16).eval()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with Launched("--model", args.model, "--tp", str(args.tp), "--dtype", "bfloat16") as server:
        throughput(server.url, [(prompt, OUTPUT_TOKENS) for prompt in prompts(8, INPUT_TOKENS)])
        generate(model, prompts(8, INPUT_TOKENS), OUTPUT_TOKENS)
        for row in args.row:
            ROWS[row](server.url, model, args.rounds)


if __name__ == "__main__":
    main()
