"""Rotary position embedding tables."""

from __future__ import annotations

import torch
from torch import Tensor

from tpserve.model.spec import ModelSpec


class RotaryTable:
    """Cosines and sines of position * theta ** (-2i / head_dim), for i below head_dim / 2 (Su et al. 2021)."""

    def __init__(self, spec: ModelSpec, device: torch.device):
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        self._inverse = (1.0 / spec.rope_theta**exponents).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each (tokens, 1, head_dim / 2) float32, for positions (tokens,)."""
        angles = (positions.float()[:, None] * self._inverse)[:, None]
        return angles.cos(), angles.sin()
