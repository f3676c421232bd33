"""One draw per row from a rank's slice of the logits: the arg max of logit / temperature + noise.

That is a draw from softmax(logits / temperature) (the Gumbel-max trick), and the best of all ranks' draws is one
from the whole vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpserve.worker.noise import HIGHEST, LANES, RowNoise

_NEAR = 4.0  # ids this near to the greatest logit / temperature are tried first; any value gives the same result
_ROUNDING = 2.0**-20  # relative; several times what a sum loses in float32
_CHUNK_BLOCKS = 16384  # noise made at once: its intermediate results stay in a core's cache
_LOWEST = torch.finfo(torch.float32).min


def draw(logits: Tensor, tops: Tensor, temperatures: Tensor, least: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
    """The greatest (logit - top) / temperature + noise of each row and its column: float32 and int64 (rows,).

    `logits` is float32 (rows, columns), of this rank's ids. `tops`, `temperatures` (not 0) and `least`, below which
    nothing is drawn, are float32 (rows,). A row with nothing to draw from gives -inf and any column; of equal sums
    the lowest column wins.

    Noise is dear and most ids cannot win: a draw from the likeliest few shows what the others would have to beat,
    even with the highest noise there is and whatever rounding does to their sums.
    """
    best, _ = greatest(logits)
    reached, _ = _draw(logits, tops, temperatures, torch.maximum(least, best - _NEAR * temperatures), noise)
    exact = reached.double()
    slack = HIGHEST + _ROUNDING * (HIGHEST + exact.abs())
    can_win = (tops.double() + temperatures.double() * (exact - slack)).float()
    return _draw(logits, tops, temperatures, torch.maximum(least, can_win), noise)


def _draw(logits: Tensor, tops: Tensor, temperatures: Tensor, least: Tensor, noise: RowNoise) -> tuple[Tensor, Tensor]:
    """The same, with noise for all logits from `least` on."""
    if not logits.shape[1]:
        return greatest(logits)
    logits = F.pad(logits, (0, -logits.shape[1] % LANES), value=-torch.inf)
    least = least.clamp_min(_LOWEST)
    # Noise is made by blocks. One is wanted if any of its ids is: its four bools, read as one integer, are not 0.
    rows, blocks = torch.nonzero((logits >= least[:, None]).view(torch.int32)).unbind(1)
    places = rows * (logits.shape[1] // LANES) + blocks
    of_row = torch.stack((tops, temperatures, least), dim=1)
    sums = torch.full_like(logits, -torch.inf)
    for row, block, place in zip(*(x.split(_CHUNK_BLOCKS) for x in (rows, blocks, places))):
        top, temperature, lowest = of_row.index_select(0, row).split(1, dim=1)
        values = logits.view(-1, LANES).index_select(0, place)
        excluded = values < lowest
        values.sub_(top).div_(temperature).add_(noise.of(row, block)).masked_fill_(excluded, -torch.inf)
        sums.view(-1, LANES).index_copy_(0, place, values)
    return greatest(sums)


def greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest of each row, NaN if there is one, and its first column; -inf and 0 if there are no columns."""
    if not logits.shape[1]:
        return logits.new_full((len(logits),), -torch.inf), logits.new_zeros(len(logits), dtype=torch.int64)
    values, columns = logits.max(dim=1)
    return values, columns
