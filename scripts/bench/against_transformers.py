#!/usr/bin/env python
"""tpserve against `transformers.generate`, side by side in one run: alternating rounds, medians, ratios.

    python scripts/bench/against_transformers.py [--model demo] [--tp 2] [--rounds 3]

Every round sends new random prompts (128 tokens in, 64 out, greedy, bfloat16) to the server at 1, 8 and 32
at once, and gives as many to `generate`: as one batch, and one after the other (the first 4 of them).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from load import Launched, prompts, throughput
from transformers import AutoModelForCausalLM

from tpserve.checkpoint.source import describe
from tpserve.settings import Settings

INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
SERIAL_REQUESTS = 4


def generate(model: torch.nn.Module, batch: list[list[int]]) -> float:
    """Output tokens per second of one call of `generate`."""
    ids = torch.tensor(batch)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    if out.shape[1] != INPUT_TOKENS + OUTPUT_TOKENS:
        raise SystemExit(f"generate gave {out.shape[1]} tokens")
    return len(batch) * OUTPUT_TOKENS / (time.perf_counter() - began)


def serial(model: torch.nn.Module, batch: list[list[int]]) -> float:
    """The same, one prompt after the other."""
    few = batch[:SERIAL_REQUESTS]
    return statistics.harmonic_mean([generate(model, [prompt]) for prompt in few])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(describe(Settings(model=args.model)).path, dtype=torch.bfloat16).eval()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with Launched("--model", args.model, "--tp", str(args.tp), "--dtype", "bfloat16") as server:
        throughput(server.url, prompts(8, INPUT_TOKENS), OUTPUT_TOKENS)
        generate(model, prompts(8, INPUT_TOKENS))
        print("at once   tpserve tok/s   batched   serial   ratio to batched   ratio to serial")
        for count in (1, 8, 32):
            ours, batched, alone = [], [], []
            for _ in range(args.rounds):
                batch = prompts(count, INPUT_TOKENS)
                ours.append(throughput(server.url, batch, OUTPUT_TOKENS))
                batched.append(generate(model, batch))
                alone.append(serial(model, batch))
            a, b, c = (statistics.median(values) for values in (ours, batched, alone))
            print(f"{count:7} {a:15.1f} {b:9.1f} {c:8.1f} {a / b:18.2f} {a / c:17.2f}", flush=True)


if __name__ == "__main__":
    main()
