"""Logprobs over a vocabulary that is split between ranks: of the ids that stand at some positions, and of the likeliest.

Each rank measures its columns; one gather takes all ranks' measures to all ranks, where they are put together:
log p(id) = logit(id) - log(sum over the ranks of exp(a rank's log-sum-exp)).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tpserve.messages import NO_SCORES, Scores
from tpserve.parallel.collectives import Collectives
from tpserve.parallel.partition import Span

_CHUNK = 64  # positions whose logits are in memory at once


def measure(logits: Tensor, own: Tensor, width: int, first_id: int) -> Tensor:
    """One rank's measures of some positions: int32 (positions, 2 + 2 width), to be gathered and given to `merge`.

    `logits` is float32 (positions, columns), of the ids from `first_id` on; `own` is float32 (positions,), the logit
    of the id that stands there, as far as this rank has it. A row holds the bits of it, of the log-sum-exp and of
    the `width` greatest logits, then their ids.
    """
    count, columns = logits.shape
    sums, values = own.new_full((count, 1), -torch.inf), own.new_full((count, width), -torch.inf)
    ids = torch.zeros((count, width), dtype=torch.int32, device=logits.device)
    if columns:
        torch.logsumexp(logits, dim=1, keepdim=True, out=sums)
        greatest = logits.topk(min(width, columns), dim=1)
        values[:, : greatest.values.shape[1]] = greatest.values
        ids[:, : greatest.values.shape[1]] = greatest.indices + first_id
    return torch.cat((torch.cat((own[:, None], sums, values), dim=1).view(torch.int32), ids), dim=1)


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
        mine = np.flatnonzero(vocab.holds(ids))
        own = logits.new_full((len(ids),), -torch.inf)
        own[mine] = logits[mine, ids[mine] - vocab.start]
        measures.append(measure(logits, own, width, vocab.start))
    return merge(collectives.all_gather(torch.cat(measures)).cpu().numpy(), targets, tops)


def _beside_each_other(of_ranks: np.ndarray) -> np.ndarray:
    """(ranks, positions, width) -> (positions, ranks * width)."""
    ranks, positions, width = of_ranks.shape
    return of_ranks.transpose(1, 0, 2).reshape(positions, ranks * width)
