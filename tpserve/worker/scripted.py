"""A double of the decoder that says what a script has: answers that no model would give when they are wanted.

For tests of what comes behind a model: text, stop strings, logprobs. Everything else of a worker is as ever.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from tpserve.kernels.interface import KINDS, Forward, StepTokens
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import Shard

_LEAD = 8.0  # of the id that the script has, over the greatest of the others
_STEP, _LEVELS = 0.25, 16


class ScriptedDecoder:
    """Has the part of `Decoder` that a runner uses. The hidden state of a token is the id that the script has next.

    The script is a JSON file: a list of [prompt, answer], lists of ids. What comes next depends on a token's id and
    position alone; two answers that differ behind the same id at the same position are refused (ValueError). After
    an answer comes id 0. Logits are -(id mod 16) / 4, and 8 of the id that comes next.
    """

    def __init__(self, spec: ModelSpec, shard: Shard, script: Path):
        self.spec = spec
        self.shard = shard
        self.seconds = [0.0] * len(KINDS)
        self._next: dict[tuple[int, int], int] = {}
        for prompt, answer in json.loads(script.read_text()):
            ids = [*prompt, *answer]
            for position in range(len(prompt) - 1, len(ids) - 1):
                place = position, ids[position]
                if self._next.setdefault(place, ids[position + 1]) != ids[position + 1]:
                    raise ValueError(f"{script}: two answers differ behind id {place[1]} at position {place[0]}")

    def capture(self, pools: Tensor) -> Forward:
        """A forward pass that gives the ids that come next, (tokens, 1) int64."""
        return self._forward

    def _forward(self, tokens: StepTokens, last_ids: Tensor) -> Tensor:
        ids = tokens.ids.copy()
        ids[tokens.fed] = last_ids.numpy()[tokens.fed_slots]
        return torch.tensor([[self._next.get(place, 0)] for place in zip(tokens.positions.tolist(), ids.tolist())])

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits, float32 (rows, columns)."""
        vocab = self.shard.vocab
        ids = torch.arange(vocab.start, vocab.stop)
        background = -_STEP * (ids % _LEVELS).float()
        return torch.where(ids == hidden, _LEAD, background)
