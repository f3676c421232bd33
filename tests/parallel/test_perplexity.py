"""Perplexity of the demo model over real text, through real workers: the measure in which many small errors add up.

The text is the beginning of the Jargon File 4.4.7, which is in the public domain.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.group import WorkerGroup
from tpserve.messages import Row
from tpserve.preflight import resolve
from tpserve.settings import Settings

TEXT = Path(__file__).parents[1] / "fixtures" / "jargon_file.txt.gz"
WINDOW, WINDOWS = 1024, 2
# By transformers in float32: windows scored one by one, the first token of each not scored.
FIRST_WINDOW_NLL, PERPLEXITY = 3331.6089, 12.13785
PAGE = 16


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_perplexity_is_within_a_thousandth_of_the_reference(demo_model: Path, ranks: int) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids = tokenizer.encode(gzip.decompress(TEXT.read_bytes()).decode(), add_special_tokens=False).ids
    windows = [ids[place * WINDOW : (place + 1) * WINDOW] for place in range(WINDOWS)]
    settings = Settings(
        model=str(demo_model), tp=ranks, dtype="float32", device="cpu", block_size=PAGE, kv_cache_memory=2**27,
        max_model_len=2 * WINDOW, max_num_seqs=1, max_num_batched_tokens=WINDOW,
    )  # fmt: skip
    with WorkerGroup(resolve(settings)) as group:
        losses = [negative_log_likelihood(group, window) for window in windows]
    assert losses[0] == pytest.approx(FIRST_WINDOW_NLL, rel=1e-4)
    assert np.exp(sum(losses) / (WINDOWS * (WINDOW - 1))) == pytest.approx(PERPLEXITY, rel=1e-3)


def negative_log_likelihood(group: WorkerGroup, ids: list[int]) -> float:
    """Of all tokens but the first."""
    row = dict(slot=0, count=len(ids), ids=ids, pages=range(-(-len(ids) // PAGE)), flags=Row.FIRST | Row.LOGITS)
    logits = torch.from_numpy(group.run([row]).logits[0][:-1])
    targets = torch.tensor(ids[1:])
    return float(torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().sum())
