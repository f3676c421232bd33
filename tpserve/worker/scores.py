"""Logprobs over a vocabulary that is split between ranks: of the ids that stand at some positions, and of the likeliest.

Each rank measures its columns; one gather takes all ranks' measures to all ranks, where they are put together:
log p(id) = logit(id) - log(sum over the ranks of exp(a rank's log-sum-exp)).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from tpserve.messages import NO_SCORES, Scores
from tpserve.parallel.collectives import Collectives
from tpserve.parallel.partition import Span
from tpserve.worker.gather import gather
from tpserve.worker.passes import TORCH, Passes, logits_at

_MINUS_INFINITY = np.float32(-np.inf)
_CHUNK = 64  # positions whose logits are in memory at once


def measure(logits: Tensor, columns: np.ndarray, width: int, first_id: int, passes: Passes) -> np.ndarray:
    """One rank's measures of some positions: int32 (positions, 2 + 2 width), to be gathered and given to `merge`.

    `logits` is float32 (positions, columns), of the ids from `first_id` on; `columns`, int64 (positions,), are those of
    the ids that stand there, negative where another rank has them. A row holds the bits of its logit, of the log-sum-exp
    and of the `width` greatest logits, then their ids.
    """
    index = np.arange(len(logits))
    own = np.where(columns < 0, _MINUS_INFINITY, logits_at(logits, index, columns.clip(0)))
    sums = passes.log_sum_exp(logits, index)
    values, likeliest = passes.top(logits, index, width)
    numbers = np.column_stack((own, sums, values))
    return np.column_stack((numbers.view(np.int32), likeliest + np.int32(first_id)))


def merge(measures: np.ndarray, ids: np.ndarray, tops: np.ndarray) -> Scores:
    """The scores of positions at which `ids` (positions,) stand, with the `tops[p]` likeliest of each.

    `measures` is int32 (ranks, positions, 2 + 2 width) as `measure` makes them; the own logit counts where it is greatest.
    """
    width = (measures.shape[2] - 2) // 2
    numbers = np.ascontiguousarray(measures[:, :, : 2 + width]).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):  # a row that is not finite is not shown
        sums = np.logaddexp.reduce(numbers[:, :, 1], axis=0)
    values = _beside_each_other(numbers[:, :, 2:])
    likeliest = _beside_each_other(measures[:, :, 2 + width :])
    order = np.lexsort((likeliest, -values), axis=1)[:, :width]
    entries = np.column_stack((numbers[:, :, 0].max(axis=0), np.take_along_axis(values, order, 1))) - sums[:, None]
    entry_ids = np.column_stack((ids, np.take_along_axis(likeliest, order, 1)))
    shown = np.arange(1 + width) <= tops[:, None]
    return Scores((tops + 1).astype("<u2"), entry_ids[shown].astype("<i4"), entries[shown].astype("<f4"))


def of_targets(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: np.ndarray,
    tops: np.ndarray,
    vocab: Span,
    collectives: Collectives,
    passes: Passes = TORCH,
) -> Scores:
    """The scores of `targets`, int64 (positions,), given the final hidden states (positions, hidden) before them.

    `head` makes logits of hidden states: of the ids in `vocab`, those of this rank. One gather, if there is a target.
    """
    if not len(targets):
        return NO_SCORES
    width = int(tops.max())
    measures = []
    for first in range(0, len(targets), _CHUNK):
        logits, ids = head(hidden[first : first + _CHUNK]), targets[first : first + _CHUNK]
        columns = np.where(vocab.holds(ids), ids - vocab.start, -1)
        measures.append(measure(logits, columns, width, vocab.start, passes))
    return merge(gather(np.concatenate(measures), collectives, hidden.device), targets, tops)


def _beside_each_other(of_ranks: np.ndarray) -> np.ndarray:
    """(ranks, positions, width) -> (positions, ranks * width)."""
    ranks, positions, width = of_ranks.shape
    return of_ranks.transpose(1, 0, 2).reshape(positions, ranks * width)
