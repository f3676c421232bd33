"""Top-k, top-p and min-p over a vocabulary that is split between ranks: exactly, and the same at every split.

Each filter keeps the ids whose logit is at least some threshold, ties included, so a row's filters together are
one threshold. Top-k and top-p find theirs by radix selection: the ranks add up histograms over the digits of an
order-preserving 32-bit key of the logit. Whatever is added is an integer, so the sums do not depend on the split.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from tpserve.parallel.collectives import Collectives

_DIGITS = ((21, 11), (10, 11), (0, 10))  # shift and width in bits, from the highest: 32 bits in three gathers
_UNIT = 2.0**30  # mass of the likeliest id
_MASSLESS = -22.0  # exp of this is less than half of 1 / _UNIT


def least_logits(
    logits: Tensor,
    tops: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    collectives: Collectives,
) -> Tensor:
    """The least logit that survives each row's filters, float32 (rows,), the same on all ranks.

    `logits` is this rank's slice, float32 (rows, columns), perhaps of no columns. The rest is (rows,) and the same on
    all ranks: `tops` float32, the greatest logit over all ranks, finite; `top_ks` int64, 0 is off; `temperatures` (not
    0), `top_ps` (1 is off) and `min_ps` (0 is off) float32.
    """
    least = torch.full_like(tops, -torch.inf)
    rows = torch.nonzero(top_ks).squeeze(1)
    if len(rows):
        least[rows] = _top_k(logits[rows], top_ks[rows], collectives)
    rows = torch.nonzero(top_ps < 1).squeeze(1)
    if len(rows):
        least[rows] = _top_p(logits[rows], least[rows], tops[rows], temperatures[rows], top_ps[rows], collectives)
    return torch.maximum(least, _min_p(tops, temperatures, min_ps))


def _top_k(logits: Tensor, top_ks: Tensor, collectives: Collectives) -> Tensor:
    """The k-th greatest logit of each row, or its least if it has not so many."""
    count, columns = logits.shape
    rows = torch.arange(count, device=logits.device).repeat_interleave(columns)
    keys = _keys(logits).view(-1)
    ones = torch.ones_like(keys, dtype=torch.float64)
    return _select(count, rows, keys, ones, lambda total: torch.minimum(top_ks.double(), total), collectives)


def _top_p(
    logits: Tensor, least: Tensor, tops: Tensor, temperatures: Tensor, top_ps: Tensor, collectives: Collectives
) -> Tensor:
    """The logit at which the mass of the ids from the greatest on first reaches top_p of all ids' from `least` on."""
    tops64, temperatures64 = tops.double(), temperatures.double()
    massive = (tops64 + _MASSLESS * temperatures64).float().nextafter(least.new_tensor(-torch.inf))
    rows, columns = torch.nonzero(logits >= torch.maximum(least, massive)[:, None]).unbind(1)
    survivors = logits[rows, columns]
    mass = survivors.double().sub_(tops64[rows]).div_(temperatures64[rows]).exp_().mul_(_UNIT).round_()
    share = top_ps.double()
    return _select(
        len(logits), rows, _keys(survivors), mass, lambda total: (share * total).ceil_().clamp_(min=1), collectives
    )


def _min_p(tops: Tensor, temperatures: Tensor, min_ps: Tensor) -> Tensor:
    """The least float32 logit with exp((logit - top) / temperature) >= min_p."""
    exact = tops.double() + temperatures.double() * min_ps.double().log()
    near = exact.float()
    return torch.where(near.double() < exact, near.nextafter(near.new_tensor(torch.inf)), near)


def _select(
    count: int,
    rows: Tensor,
    keys: Tensor,
    weights: Tensor,
    target: Callable[[Tensor], Tensor],
    collectives: Collectives,
) -> Tensor:
    """For each of `count` rows the greatest logit t such that the entries of at least t weigh `target` or more.

    An entry is an element of a row on this rank: `rows` and `keys` int64, `weights` float64 with integer values, all
    (entries,). `target` is given the rows' whole weight over all ranks, float64 (count,), and may not exceed it.
    """
    found = torch.zeros(count, dtype=torch.int64, device=keys.device)
    above = torch.zeros(count, 1, dtype=torch.float64, device=keys.device)  # weight of the keys over those searched
    wanted = above
    for place, (shift, width) in enumerate(_DIGITS):
        bins = 1 << width
        digits = bins - 1 - (keys >> shift & bins - 1)  # greatest first
        # Sums of integers below 2**53 are exact in float64, in any order. (Of no entries bincount makes int64.)
        local = torch.bincount(rows * bins + digits, weights, minlength=count * bins).double()
        histogram = collectives.all_gather(local).sum(0).view(count, bins)
        reached = histogram.cumsum(1).add_(above)
        if place == 0:
            wanted = target(reached[:, -1])[:, None]
        digit = (reached < wanted).sum(1, keepdim=True)
        above = (reached - histogram).gather(1, digit)
        found = found << width | bins - 1 - digit.squeeze(1)
        inside = torch.nonzero(digits == digit.squeeze(1)[rows]).squeeze(1)
        rows, keys, weights = rows[inside], keys[inside], weights[inside]
    return _logits(found)


def _keys(logits: Tensor) -> Tensor:
    """int64 in [0, 2**32) in the order of the logits; equal logits, such as 0.0 and -0.0, have equal keys."""
    bits = (logits + 0.0).view(torch.int32)
    return _ordered(bits).long() + 2**31


def _logits(keys: Tensor) -> Tensor:
    """The inverse of `_keys`."""
    return _ordered((keys - 2**31).int()).view(torch.float32)


def _ordered(bits: Tensor) -> Tensor:
    """Floats' bits to integers of the same order, and back: negative floats are stored as sign and magnitude."""
    return bits ^ (bits >> 31 & 0x7FFFFFFF)
