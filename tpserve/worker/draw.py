"""One draw per row from a rank's slice of the logits: the arg max of logit / temperature + noise.

That is a draw from softmax(logits / temperature) (the Gumbel-max trick), and the best of all ranks' is one from the
whole vocabulary. Noise is dear and most ids cannot win, so it is drawn for the likely ids first; the best of them
shows which others still might. The result is that of drawing for all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpserve.worker.noise import HIGHEST, LANES, RowNoise

_NEAR = 4.0  # ids this near to the greatest logit / temperature are the likely ones; any value gives the same result
_ROUNDING = 2.0**-20  # relative, a multiple of what a sum loses in float32
_CHUNK_BLOCKS = 16384  # noise made at once: its intermediate results stay in a core's cache
_LOWEST = torch.finfo(torch.float32).min


def draw(
    logits: Tensor, first_id: int, best: Tensor, tops: Tensor, temperatures: Tensor, least: Tensor, noise: RowNoise
) -> tuple[Tensor, Tensor]:
    """The greatest (logit - top) / temperature + noise of each row and its column: float32 and int64 (rows,).

    `logits` is float32 (rows, columns) with `first_id`, a multiple of LANES, in column 0, and `best` its greatest by
    row. `tops` and `least`, the same on all ranks, are what to subtract and below what not to draw. The rest is
    (rows,) too. A row with nothing to draw from gives -inf and column 0; of equal sums the lowest column wins.
    """
    padded = F.pad(logits, (0, -logits.shape[1] % LANES), value=-torch.inf)
    sums = torch.full_like(padded, -torch.inf)
    ...


def greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest of each row, NaN if there is one, and its first column; -inf and 0 if there are no columns."""
    if not logits.shape[1]:
        return logits.new_full((len(logits),), -torch.inf), logits.new_zeros(len(logits), dtype=torch.int64)
    values, columns = logits.max(dim=1)
    return values, columns
