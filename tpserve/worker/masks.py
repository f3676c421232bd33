"""Bit masks of the ids that a grammar allows."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tpserve.parallel.partition import VOCAB_UNIT, Span
from tpserve.worker.passes import TORCH, WORD_BITS, Passes

assert VOCAB_UNIT % WORD_BITS == 0, "a rank's ids would begin within a word"


def apply_(logits: Tensor, rows: np.ndarray, words: np.ndarray, vocab: Span, passes: Passes = TORCH) -> None:
    """Make the logits of ids that are not allowed minus infinity, in place.

    `logits` is float32 (rows, columns), of the ids in `vocab`; `words` is uint32 (masked rows, ceil(vocabulary / 32)),
    bit i of word w being id 32 w + i, for the rows at `rows`, int64.
    """
    if vocab:
        mine = words[:, vocab.start // WORD_BITS : -(-vocab.stop // WORD_BITS)]
        passes.mask_(logits, rows, np.ascontiguousarray(mine))
