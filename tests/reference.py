"""What Hugging Face's implementation says of a model folder, and prompts cut into the rows of plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

from tpserve.messages import Row


@dataclass(frozen=True)
class Reference:
    """A prompt, its greedy continuation, and the logits (tokens, vocabulary) of both."""

    prompt: list[int]
    continuation: list[int]
    logits: np.ndarray


def references(folder: Path, sizes: list[tuple[int, int]]) -> list[Reference]:
    """For each (tokens of a random prompt, tokens of its continuation), in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(3)
    out = []
    for length, more in sizes:
        ids = rng.integers(0, model.config.vocab_size, length).tolist()
        with torch.inference_mode():
            for _ in range(more):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            out.append(Reference(ids[:length], ids[length:], model(torch.tensor([ids])).logits[0].numpy()))
    return out


def penalized(folder: Path, prompt: list[int], more: int, repetition: float, presence: float, frequency: float) -> list[int]:
    """The prompt's greedy continuation with penalties, in float32; repetition is that of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    repeat, ids = RepetitionPenaltyLogitsProcessor(repetition), list(prompt)
    for _ in range(more):
        with torch.inference_mode():
            logits = repeat(torch.tensor([ids]), model(torch.tensor([ids])).logits[:, -1])[0]
        counts = torch.bincount(torch.tensor(ids[len(prompt) :], dtype=torch.int64), minlength=len(logits))
        ids.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
    return ids[len(prompt) :]


def chunk_rows(slot: int, prompt: list[int], pages: list[int], chunk: int) -> list[dict[str, Any]]:
    """The prompt's chunks as rows, all of whose logits are asked for."""
    rows = []
    for start in range(0, len(prompt), chunk):
        ids = prompt[start : start + chunk]
        flags = Row.LOGITS | (Row.FIRST if start == 0 else 0) | (Row.SAMPLE if start + chunk >= len(prompt) else 0)
        rows.append(dict(slot=slot, count=len(ids), ids=ids, flags=flags, pages=pages if start == 0 else []))
    return rows
