"""Top-k, top-p and min-p over a vocabulary that is split between ranks: exactly, and the same at every split.

Each filter keeps the ids whose logit is at least some threshold, ties included, so all filters of a row are one
threshold. A small k finds it among the ranks' k greatest logits. A large k, and top-p, find it by radix selection:
the ranks add up histograms of the digits of an ordered key of the logit, and go on inside the bin that holds it.
What is added are integers, so the sums do not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpserve.parallel.collectives import Collectives

_GATHERED_K = 1024  # up to this k, k logits per rank are fewer bytes than histograms
_DIGITS = ((21, 11), (10, 11), (0, 10))  # shift and width of a key's digits, in bits
_UNIT = 2.0**30  # mass of the likeliest id


def least_logits(
    logits: Tensor,
    tops: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    collectives: Collectives,
) -> Tensor:
    """The least logit that each row's filters leave, float32 (rows,), the same on all ranks.

    `logits` is this rank's slice, float32 (rows, columns), perhaps of no columns. The rest is (rows,) and the same on
    all ranks: `tops` float32, the greatest logit over all ranks, finite; `temperatures` float32, positive; `top_ks`
    int64, 0 is off; `top_ps` float32, 1 is off; `min_ps` float32, 0 is off.
    """
    least = torch.full_like(tops, -torch.inf)
    small_k = (top_ks > 0) & (top_ks <= _GATHERED_K)
    for rows, top_k in ((_where(small_k), _small_top_k), (_where(top_ks > _GATHERED_K), _large_top_k)):
        if len(rows):
            least[rows] = top_k(logits[rows], top_ks[rows], collectives)
    rows = _where(top_ps < 1)
    if len(rows):
        mass = _mass(logits[rows], least[rows], tops[rows], temperatures[rows])
        least[rows] = _top_p(logits[rows], mass, top_ps[rows], collectives)
    return torch.maximum(least, _min_p(tops, temperatures, min_ps))


def _small_top_k(logits: Tensor, top_ks: Tensor, collectives: Collectives) -> Tensor:
    """The k-th greatest logit of each row."""
    most = int(top_ks.max())
    mine = logits.new_full((len(logits), most), -torch.inf)
    held = min(most, logits.shape[1])
    mine[:, :held] = logits.topk(held).values
    all_ranks = collectives.all_gather(mine).transpose(0, 1).flatten(1)
    return all_ranks.topk(most).values.gather(1, top_ks[:, None] - 1).squeeze(1)


def _large_top_k(logits: Tensor, top_ks: Tensor, collectives: Collectives) -> Tensor:
    """The k-th greatest logit of each row, or its least if it has not so many."""
    ones = torch.ones_like(logits, dtype=torch.float64)
    return _select(logits, ones, lambda total: torch.minimum(top_ks.double(), total), collectives)


def _top_p(logits: Tensor, mass: Tensor, top_ps: Tensor, collectives: Collectives) -> Tensor:
    """The logit at which the mass of the ids, from the greatest logit down, reaches top_p of the whole."""
    share = top_ps.double()
    return _select(logits, mass, lambda total: (share * total).ceil().clamp_min(1), collectives)


def _mass(logits: Tensor, least: Tensor, tops: Tensor, temperatures: Tensor) -> Tensor:
    """Probability on a fixed-point scale on which the likeliest id has _UNIT; 0 below `least`. float64 integers."""
    scaled = logits.double().sub_(tops.double()[:, None]).div_(temperatures.double()[:, None])
    return scaled.exp_().mul_(_UNIT).round_().masked_fill_(logits < least[:, None], 0)


def _min_p(tops: Tensor, temperatures: Tensor, min_ps: Tensor) -> Tensor:
    """The least float32 logit with (logit - top) / temperature >= log(min_p)."""
    exact = tops.double() + temperatures.double() * min_ps.double().log()
    near = exact.float()
    return torch.where(near.double() < exact, near.nextafter(near.new_tensor(torch.inf)), near)


def _select(logits: Tensor, weights: Tensor, target: Callable[[Tensor], Tensor], collectives: Collectives) -> Tensor:
    """The greatest logit per row such that the elements not below it weigh, over all ranks, `target` or more.

    `weights` are integers in float64, (rows, columns) as `logits`. `target` is given each row's whole weight, float64
    (rows,), and must not exceed it.
    """
    count, device = len(logits), logits.device
    rows, keys = torch.arange(count, device=device, dtype=torch.int32)[:, None], _keys(logits)
    found = torch.zeros(count, device=device, dtype=torch.int32)
    before = wanted = torch.zeros(count, 1, device=device, dtype=torch.float64)
    for shift, width in _DIGITS:
        bins = 1 << width
        places = (keys >> shift).bitwise_and_(bins - 1).add_(rows * bins)
        # Sums of integers are exact in float64 below 2**53, in any order. (Of nothing, bincount makes int64.)
        local = torch.bincount(places.view(-1), weights.view(-1), minlength=count * bins).double()
        histogram = collectives.all_gather(local).sum(0).view(count, bins)
        reached = histogram.cumsum(1).add_(before)
        if shift == _DIGITS[0][0]:
            wanted = target(reached[:, -1])[:, None]
        digit = torch.searchsorted(reached, wanted)
        before = (reached - histogram).gather(1, digit)
        digit = digit.int().squeeze(1)
        found = found << width | digit
        inside = _where((places == rows * bins + digit[rows]).view(-1))
        rows, keys, weights = rows.expand_as(keys).take(inside), keys.take(inside), weights.take(inside)
    return _keys(found.view(torch.float32)).view(torch.float32)


def _keys(logits: Tensor) -> Tensor:
    """Bits, as int32, that ascend as unsigned integers where the logits descend. Its own inverse on the bits."""
    bits = logits.view(torch.int32)
    return (bits >> 31).bitwise_not_().bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def _where(mask: Tensor) -> Tensor:
    return torch.nonzero(mask).squeeze(1)
