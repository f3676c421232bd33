"""Small arrays of the host, from every rank to every rank."""

from __future__ import annotations

import numpy as np
import torch

from tpserve.parallel.collectives import Collectives


def gather(x: np.ndarray, collectives: Collectives, device: torch.device) -> np.ndarray:
    """The ranks' `x`, which has the same shape and dtype on all, stacked: (size, *x.shape)."""
    stacked: np.ndarray = collectives.all_gather(torch.from_numpy(x).to(device)).cpu().numpy()
    return stacked
